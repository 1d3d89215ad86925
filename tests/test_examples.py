"""The examples run, and say what they should: equal losses, one trace, two lowerings. Nothing here is timed."""

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--layers", "1", "--hidden", "16", "--intermediate", "32", "--batch", "1", "--seq", "4", "--steps", "3"]


@pytest.fixture
def quickstart(monkeypatch):
    """The quickstart as a module, with its neighbours importable as they are when it runs as a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import quickstart

    return quickstart


def check(runs, names):
    """The runs have these names and agree with the first, the eager one."""
    assert [run.name for run in runs] == names
    eager = runs[0]
    for run in runs:
        assert run.losses == pytest.approx(eager.losses, abs=1e-4)
        assert run.difference(eager) < 1e-5
        expected = (1, 2) if "assume_pure" in run.name else (0, 0)
        assert (run.traces, run.lowerings) == expected, run.name
    assert len(set(eager.losses)) == len(eager.losses), "the model does not train"


def test_quickstart_on_plain_tensors(quickstart, capsys):
    names = ["cpu eager", "cpu assume_pure"]
    runs = quickstart.main([*TINY, "--plain"])
    check(runs, names)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


@pytest.mark.xla
def test_quickstart_on_all_tensors(quickstart):
    if not quickstart.HAS_XLA:
        pytest.skip("torch_xla is not installed")
    check(quickstart.main(TINY), ["cpu eager", "cpu assume_pure", "xla lazy", "xla assume_pure"])


def test_quickstart_without_torch_xla_says_so(quickstart, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "HAS_XLA", False)
    check(quickstart.main(TINY), ["cpu eager", "cpu assume_pure"])
    assert "torch_xla is not installed" in capsys.readouterr().out


def test_too_few_steps_are_refused(quickstart, capsys):
    with pytest.raises(SystemExit):
        quickstart.main(["--steps", "2"])
    assert "at least 3" in capsys.readouterr().err


@pytest.fixture
def example(monkeypatch):
    """An example as a module, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_assume_pure(example, capsys):
    assert example("assume_pure").main([]) == 1
    printed = capsys.readouterr().out
    assert "equal to eager: True" in printed and "needs_a_value is not pure" in printed


def test_scan_cumsum(example):
    sums, means, gradient = example("scan_cumsum").main()
    assert sums == [1, 3, 6] and means == [1, 1.5, 2, 2.5, 3]
    assert gradient == pytest.approx(1 + 2 * 0.5 + 3 * 0.25)


def test_while_loop(example):
    root, steps, gradient = example("while_loop").main()
    assert root == pytest.approx(2**0.5, abs=1e-5) and 2 < steps < 10
    assert gradient[0][0] == pytest.approx(5 * 0.5**4)


def test_train_scanned_decoder(example):
    losses = example("train_scanned_decoder").main(["--layers", "3", "--hidden", "16", "--steps", "4"])
    one_by_one, *loops = losses.values()
    assert len(set(one_by_one)) == 4, "the model does not train"
    for loop in loops:
        assert loop == pytest.approx(one_by_one, abs=1e-3)


@pytest.mark.parametrize("model", [[], ["--hf"]])
def test_train_gpt(example, model):
    if model:
        pytest.importorskip("transformers")
    small = ["--steps", "6", "--batch", "2", "--seq", "8", "--width", "16", "--layers", "1", "--sample", "4"]
    runs = example("train_gpt").main([*small, *model])
    eager = runs["eager"].losses
    assert len(set(eager)) == 6, "the model does not train"
    for run in runs.values():
        assert run.losses == pytest.approx(eager, abs=1e-3)


def test_kv_cache_decode(example):
    runs = example("kv_cache_decode").main(["--layers", "1", "--hidden", "32", "--tokens", "5"])
    assert all(run.tokens == runs[0].tokens for run in runs)
    assert all(run.lowerings == 0 for run in runs if "assume_pure" in run.name)
