"""`python -m pure_backend check`: every check passes on the devices here, and what goes wrong is told."""

import pytest
import torch

from pure_backend import check
from pure_backend.__main__ import main


def test_every_check_passes(device):
    outcomes = list(check.run_checks(device))
    assert [o.check for o in outcomes] == list(check.CHECKS)
    assert [(o.check, o.problem) for o in outcomes if o.problem] == []


def _wrong(device):
    return lambda: torch.ones(3), lambda: torch.full((3,), 1.1)


def _nan(device):
    return lambda: torch.full((3,), torch.nan), lambda: torch.ones(3)


def _raises(device):
    raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [(_wrong, "differs from eager"), (_nan, "differs from eager"), (_raises, "RuntimeError: no memory")],
)
def test_what_goes_wrong_is_told(wrong, problem, monkeypatch, capsys):
    monkeypatch.setattr(check, "CHECKS", {"this one": wrong})
    assert main(["check", "--device", "cpu"]) == 1
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "this one" in printed and problem in printed


def test_a_second_trace_is_told(monkeypatch):
    def again(device):
        sizes = iter([1, 2])

        def ours():
            x = torch.ones(next(sizes))
            return check._compiled(lambda x: x + 1)(x).mean()

        return ours, lambda: torch.tensor(2.0)

    monkeypatch.setattr(check, "CHECKS", {"again": again})
    (outcome,) = check.run_checks(torch.device("cpu"))
    assert outcome.problem == "the second call traced again"


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(check, "devices", lambda: [torch.device("cpu")])
    assert main(["check", "--device", "cuda"]) == 2
    assert "no cuda device" in capsys.readouterr().err
