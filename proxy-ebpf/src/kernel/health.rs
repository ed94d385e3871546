//! The map `health`, which both families share, and its subprograms.

use proxy_common::V4;

use super::handle::Kernel;
use super::maps::HEALTH;
use crate::env::{Health, Node};
use crate::select::health;
use crate::shared::Raw;

/// [`health::weigh`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn weigh(id: u32, client: u32, random: u32) -> u32 {
    health::weigh(Kernel::<V4>::new(), id, client, random)
}

/// [`health::failed`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn failed(id: u32, client: u32) -> u32 {
    health::failed(Kernel::<V4>::new(), id, client)
}

impl<F: 'static> Health for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn health(self, id: u32) -> Option<Raw<u64>> {
        // SAFETY: a map value, aligned to eight bytes.
        HEALTH.get_ptr_mut(id).map(|word| unsafe { Raw::new(word) })
    }

    #[inline(always)]
    fn weigh(self, id: u32, client: u32, random: u32) -> u32 {
        weigh(id, client, random)
    }

    #[inline(always)]
    fn failed(self, id: u32, client: u32) -> u32 {
        failed(id, client)
    }
}
