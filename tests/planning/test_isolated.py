import os
import signal

import pytest

from jaxdl.errors import ConfigError
from jaxdl.planning.isolated import Killed, in_own_process


def process():
    return os.getpid()


def send_yourself(number):
    os.kill(os.getpid(), number)


def refuse(key):
    raise ConfigError(f"{key} is wrong")


def test_the_answer_comes_from_another_process():
    assert in_own_process(process) != os.getpid()


def test_a_refusal_is_passed_on():
    with pytest.raises(ConfigError, match="data is wrong"):
        in_own_process(refuse, "data")


def test_only_sigkill_is_taken_for_a_lack_of_memory():
    with pytest.raises(Killed):
        in_own_process(send_yourself, signal.SIGKILL)
    with pytest.raises(SystemExit) as left:
        in_own_process(send_yourself, signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM
