//! The maps `health` and `skips`, which both families share, and their subprograms.

use proxy_common::V4;

use super::handle::Kernel;
use super::maps::{Elements as _, HEALTH, SKIPS};
use crate::env::{Health, Node};
use crate::select::health;
use crate::shared::Raw;

/// [`health::rank_slow`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rank_slow(id: u32, client: u32, random: u32) -> u32 {
    health::rank_slow(Kernel::<V4>::new(), id, client, random)
}

/// [`health::note_failure`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn note_failure(id: u32, client: u32, failure: u32) -> u32 {
    health::note_failure(Kernel::<V4>::new(), id, client, failure)
}

/// [`health::answered`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn answered(id: u32) -> u32 {
    health::answered(Kernel::<V4>::new(), id);
    0
}

impl<F: 'static> Health for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn health(self, id: u32) -> Option<Raw<u64>> {
        // SAFETY: a map value, aligned to eight bytes.
        HEALTH.at(id).map(|word| unsafe { Raw::new(word) })
    }

    #[inline(always)]
    fn rank_slow(self, id: u32, client: u32, random: u32) -> u32 {
        rank_slow(id, client, random)
    }

    #[inline(always)]
    fn skip(self, index: u32) -> Option<Raw<u64>> {
        // SAFETY: as in `health`.
        SKIPS.get_ptr_mut(index).map(|word| unsafe { Raw::new(word) })
    }

    #[inline(always)]
    fn note_failure(self, id: u32, client: u32, failure: u32) -> u32 {
        note_failure(id, client, failure)
    }

    #[inline(always)]
    fn answered(self, id: u32) {
        answered(id);
    }
}
