"""Detection of evaluations."""

from __future__ import annotations

from support.late_modules import torch

from ciuic.training.preemption import WeightSample, evaluating


def test_it_does_when_no_model_trains() -> None:
    """A program evaluates if no model trains; averages of weights do not count, and without a model it does not."""
    model, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).eval()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert not evaluating([model, teacher, average, optimizer])
    model.eval()
    assert evaluating([model, teacher, average, optimizer])
    assert not evaluating([optimizer])


def test_weights_that_were_put_in_for_the_evaluation_are_noticed() -> None:
    """Weights that were replaced for an evaluation are noticed, though no version counter changed."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2))
    glimpse = WeightSample([model, {"not": "a model"}])
    assert not glimpse.is_still()
    glimpse.take()
    assert glimpse.is_still()
    own = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    assert not glimpse.is_still()
    for parameter, value in zip(model.parameters(), own, strict=True):
        parameter.data.copy_(value)
    assert glimpse.is_still()
