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
    /// Returns the handle.
    #[expect(clippy::new_without_default, reason = "a handle, and no value")]
    #[inline(always)]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

/// A map that only the programs need, in addition to the traits of the stages.
pub trait Scratch: Node {
    /// Returns the context of the packet that this CPU processes. The program asks for it once and passes it from stage to
    /// stage. A CPU finishes a packet before it begins another one.
    fn scratch(self) -> Option<&'static mut PacketCtx<Words<Self>>>;
}
