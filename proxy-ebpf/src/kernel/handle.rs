//! The handle of the maps of one address family.

use core::marker::PhantomData;

use crate::context::PacketCtx;
use crate::env::{Node, Words};

/// The maps of one address family in the kernel.
pub struct Kernel<F>(PhantomData<F>);

impl<F> Clone for Kernel<F> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Kernel<F> {}

impl<F> Kernel<F> {
    /// The maps.
    #[expect(clippy::new_without_default, reason = "a handle, and no value")]
    #[inline(always)]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

/// What a family's programs ask beside the traits of the stages.
pub trait Scratch: Node {
    /// The context of the packet that this CPU works on: asked for once, by the program, and handed from stage to stage. A
    /// packet is done before another begins on the same CPU.
    fn scratch(self) -> Option<&'static mut PacketCtx<Words<Self>>>;
}
