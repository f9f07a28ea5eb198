"""Functions with derivatives of their own. Wrong ones show who used them."""

from torch.autograd import Function


class SinByRule(Function):
    """A sine with right rules, in reverse and in forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


class TripledSinForFunc(SinByRule):
    """The wrong one in the style that torch.func takes, and in forward mode too."""

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * cotangent * x.cos()

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * tangent * x.cos()
