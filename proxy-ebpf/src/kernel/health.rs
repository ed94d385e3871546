//! The maps `health` and `skips`, which both families share.

use super::calls::through_global;
use super::handle::Kernel;
use super::maps::{Elements as _, HEALTH, SKIPS};
use crate::calls::health_calls;
use crate::env::{Health, Node};
use crate::shared::Raw;

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
    fn skip(self, index: u32) -> Option<Raw<u64>> {
        // SAFETY: as in `health`.
        SKIPS.get_ptr_mut(index).map(|word| unsafe { Raw::new(word) })
    }

    health_calls!(through_global!(both));
}
