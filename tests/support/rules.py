"""Functions with derivatives of their own: wrong ones, which show who used them."""

from torch.autograd import Function


class TripledSin(Function):
    """A sine whose gradient is three times too large, in reverse mode only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * cotangent * x.cos()


class TripledSinForFunc(Function):
    """The same, in the style that torch.func takes, and in forward mode too."""

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
        (x,) = ctx.saved_tensors
        return 3 * cotangent * x.cos()

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * tangent * x.cos()


class StashedSin(Function):
    """The same, which keeps a tensor on its context past torch's saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * cotangent * ctx.x.cos()
