import gc
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel_backends import Bundle, DDPConfig, Run, SingleBackend
from accel_backends.core.config import BackendConfig
from accel_precision import GradScalerKwargs, PrecisionPolicy
from accel_state import BackendError, ConfigError, PrepareError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def prepared(backend, lr=0.1):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    bundle = backend.prepare(Bundle([model], [optimizer]))
    return bundle.models[0], bundle.optimizers[0]


def test_prepare_keeps_order_and_objects(single):
    model, optimizer, scheduler = net(), None, object()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bundle = single().prepare(Bundle([model], [optimizer], [scheduler]))
    assert bundle.models == [model]
    assert bundle.optimizers == [optimizer]
    assert bundle.schedulers == [scheduler]


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("precision", ["no", "fp64", "bf16", "fp16"])
def test_a_factor_of_the_loss_is_one_of_the_gradients(single, scale, precision):
    backend = single(precision)
    model, optimizer = prepared(backend)
    x = torch.randn(3, 4)
    backend.backward(model(x).square().mean(), scale=scale)
    backend.gradients.unscale([optimizer])
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    if backend.loss_scale is not None:
        backend.loss_scale.update()
    backend.backward(model(x).square().mean())
    backend.gradients.unscale([optimizer])
    for own, parameter in zip(found, model.parameters(), strict=True):
        expected = parameter.grad * scale
        bound = {"no": 1e-6, "fp64": 1e-14, "bf16": 2e-2, "fp16": 2e-3}[precision]
        assert float((own - expected).norm() / expected.norm()) <= bound


def test_a_half_precision_loss_is_scaled_in_full(single):
    backend = single("fp16,output=none")
    model, optimizer = prepared(backend)
    backend.backward(model(torch.randn(3, 4)).mean(), scale=0.5)
    backend.gradients.unscale([optimizer])
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_backwards_keywords_reach_torch(single):
    backend = single()
    model, _ = prepared(backend)
    loss = model(torch.randn(3, 4)).mean()
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    backend.backward(loss, scale=0.5, retain_graph=True)
    backend.backward(loss)
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, 1.5 * gradient)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model: 1.0, "got a float; expected the loss as a tensor"),
        (lambda model: model(torch.ones(3, 4)), r"loss of shape \(3, 2\); expected one number"),
        (lambda model: model(torch.ones(3, 4)).mean().detach(), "without a graph"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_loss_that_is_none_is_explained(single, loss, words, scale, precision):
    backend = single(precision)
    model, _ = prepared(backend)
    with pytest.raises(BackendError, match=words):
        backend.backward(loss(model), scale=scale)


def test_errors_of_the_users_backward_stay_what_they_are(single):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.sum()

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        single().backward(Broken.apply(torch.ones(2, requires_grad=True)))


def test_a_step_that_overflowed_is_left_out_and_said_so(single):
    backend = single("fp16")
    model, optimizer = prepared(backend)
    before = [p.detach().clone() for p in model.parameters()]
    backend.backward(model(torch.randn(3, 4)).sum() * math.inf)
    assert backend.step(optimizer) is False
    if backend.loss_scale is not None:
        backend.loss_scale.update()
    assert backend.loss_scale.current == 32768.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    backend.zero_grad(optimizer)
    backend.backward(model(torch.randn(3, 4)).mean())
    assert backend.step(optimizer) is True


def test_scaler_options_and_state_reach_the_scaler(single):
    backend = single("fp16", scaler=GradScalerKwargs(init_scale=8.0))
    assert backend.loss_scale.state_dict()["scale"] == 8.0
    backend.loss_scale.load_state_dict({"scale": 4.0, "growth_tracker": 1})
    assert backend.loss_scale.current == 4.0
    assert list(single("bf16").states.loss_scales) == []


def test_a_step_with_a_closure(single):
    backend = single()
    model, _ = prepared(backend)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        backend.backward(loss)
        calls.append(1)
        return loss

    assert backend.step(optimizer, closure)
    assert len(calls) > 1


def test_clipping_reaches_gradients_and_returns_their_norm(single):
    backend = single()
    model, _ = prepared(backend)
    backend.backward(model(torch.randn(3, 4)).square().sum() * 100)
    norm = backend.gradients.clip_norm(model.parameters(), 1.0)
    assert float(norm) > 1.0
    assert float(backend.gradients.clip_norm(model.parameters(), math.inf)) == pytest.approx(1.0, rel=1e-5)
    backend.gradients.clip_value(model.parameters(), 0.01)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) <= 0.01 + 1e-9


def test_clipping_foreign_parameters_is_refused(single):
    backend = single()
    kept = prepared(backend)
    assert kept
    with pytest.raises(BackendError, match=r"4 of 4 parameters to clip belong to no prepared model.*shape \(8, 4\)"):
        backend.gradients.clip_norm(net().parameters(), 1.0)


def test_layers_added_after_prepare_are_clipped_with_the_others(single):
    backend = single()
    model, optimizer = prepared(backend)
    model.append(nn.Linear(2, 1))
    group = {"params": list(model[-1].parameters())}
    backend.gradients.check_group(group)
    optimizer.add_param_group(group)
    backend.backward(model(torch.ones(3, 4)).sum())
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(backend.gradients.clip_norm(model.parameters(), 0.5), expected)
    backend.gradients.clip_value(model.parameters(), 0.01)
    assert float(model[-1].bias.grad) == pytest.approx(0.01)


def test_sparse_gradients_are_saved_as_dense_ones_and_restored_as_sparse(single):
    backend = single()
    model = backend.prepare(Bundle([nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))])).models[0]
    backend.backward(model(torch.tensor([1, 3, 3])).sum())
    before = model[0].weight.grad.to_dense()
    held = backend.gradients.unreduced(model)
    assert torch.equal(held["0.weight"], before)
    backend.gradients.set_unreduced(model, held)
    assert model[0].weight.grad.is_sparse
    backend.backward(model(torch.tensor([1, 3, 3])).sum())
    assert torch.equal(model[0].weight.grad.to_dense(), 2 * before)


def test_clipping_what_is_no_parameter_is_refused(single):
    backend = single()
    model, optimizer = prepared(backend)
    others = {"tuple": model.named_parameters(), "str": dict(model.named_parameters()), "dict": optimizer.param_groups}
    for kind, given in others.items():
        with pytest.raises(BackendError, match=rf"clipping was given a \w+ of {kind}; expected parameters"):
            backend.gradients.clip_norm(given, 1.0)
    with pytest.raises(BackendError, match=r"clipping was given a Sequential; expected its parameters"):
        backend.gradients.clip_value(model, 1.0)


def test_non_finite_gradients_are_named(single):
    backend = single()
    model, _ = prepared(backend)
    backend.backward(model(torch.randn(3, 4)).sum())
    model[2].bias.grad[0] = math.nan
    with pytest.raises(BackendError, match=r"nan or inf: 2\.bias$"):
        backend.gradients.clip_norm(model.parameters(), 1.0, error_if_nonfinite=True)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    good = backend.gradients.finite(list(gradients.values()))
    assert [name for name, fine in zip(gradients, good, strict=True) if not fine] == ["2.bias"]


def test_the_defaults_mean_one_device(single):
    backend = single()
    model, _ = prepared(backend)
    assert backend.gradients.ranks == 1
    with backend.no_sync(model), backend.trigger_sync(model), backend.gradients.join([model]):
        backend.gradients.average_parameters(model)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (lambda: [net()] * 2, "model 1 .Sequential. was given to prepare twice"),
        (lambda: [nn.Linear(2, 2, device="meta")], "on the meta device, without values"),
        (
            lambda: [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))],
            r"0\.weight on cpu, 1\.weight on meta",
        ),
    ],
)
def test_models_that_cannot_be_prepared_are_refused(single, models, words):
    with pytest.raises(PrepareError, match=words):
        single().prepare(Bundle(models()))


def test_a_model_that_is_not_to_be_placed_stays_where_it_is(single, monkeypatch):
    backend, model = single(), net()
    monkeypatch.setattr(model, "to", lambda *_: pytest.fail("moved"))
    (placed,) = backend.prepare(Bundle([model], place=(False,))).models
    assert placed is model


def test_preparing_again_is_refused_until_released(single):
    backend = single("bf16")
    model, _ = prepared(backend)
    with pytest.raises(PrepareError, match="this Sequential is prepared already"):
        backend.prepare(Bundle([model]))
    backend.release([model])
    assert type(model) is nn.Sequential
    backend.prepare(Bundle([model]))


def test_an_optimizer_of_another_model_is_named(single):
    model, other = net(), net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(
        PrepareError, match=r"SGD updates parameters of no prepared model: group 0 parameter 4 .* and 1 more"
    ):
        single().prepare(Bundle([model], [optimizer]))


def test_an_optimizer_may_come_after_its_model(single):
    backend = single()
    model, _ = prepared(backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert backend.prepare(Bundle([], [optimizer])).optimizers == [optimizer]


def test_options_of_another_backend_are_refused(session):
    with pytest.raises(BackendError, match="backend 'single' takes SingleConfig, and got DDPConfig"):
        SingleBackend(Run(session, PrecisionPolicy()), DDPConfig())


def test_true_half_precision_trains(single):
    backend = single("bf16-true")
    model, optimizer = prepared(backend)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    backend.backward(model(torch.randn(3, 4)).square().mean())
    assert backend.step(optimizer)


def test_emulated_fp8_trains(single):
    pytest.importorskip("torchao")
    backend = single("fp8")
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared_model = backend.prepare(Bundle([model], [optimizer])).models[0]
    assert type(prepared_model[1]).__name__ == "Float8Linear"
    backend.backward(prepared_model(torch.randn(4, 16)).square().mean())
    assert backend.step(optimizer)
    assert list(backend.states.model(prepared_model)) == [f"{i}.{n}" for i in range(3) for n in ("weight", "bias")]


def test_prepare_and_release_leave_nothing_behind(single):
    backend = single("bf16")
    left = []
    for _ in range(5):
        model, optimizer = prepared(backend)
        backend.backward(model(torch.randn(2, 4)).square().mean(), scale=0.5)
        backend.step(optimizer)
        left += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
        backend.release([model])
        del model, optimizer
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []


@dataclass
class Options(BackendConfig):
    backend = "mine"
    degree: int = 1


def test_options_are_made_of_plain_mappings():
    assert Options.build({"degree": 3}) == Options(3)
    assert Options.build() == Options()
    options = Options(2)
    assert Options.build(options) is options


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"degre": 1}, "Options has no field 'degre'; fields: degree; did you mean 'degree'"),
        ([1], "type list; expected"),
    ],
)
def test_options_that_are_none_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        Options.build(values)


def test_a_hook_that_writes_into_the_losss_gradient_changes_that_backward_only(single):
    backend = single()
    found = []
    for hooked in (True, False, False):
        weight = nn.Parameter(torch.ones(2))
        loss = weight.sum()
        if hooked:
            loss.register_hook(lambda gradient: gradient.mul_(2.0))
        backend.backward(loss, scale=0.5)
        found.append(weight.grad.tolist())
    assert found == [[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]]


def test_a_model_is_converted_before_it_is_moved(single, monkeypatch):
    backend, moved = single("bf16-true"), []
    place = type(backend).place

    def noted(self, model):
        moved.extend(parameter.dtype for parameter in model.parameters())
        return place(self, model)

    monkeypatch.setattr(type(backend), "place", noted)
    prepared(backend)
    assert set(moved) == {torch.bfloat16}
