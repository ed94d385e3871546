//! Subprograms for the selection of a backend.

use proxy_common::service::ServiceEntry;
use proxy_common::{V4, V6};

use super::handle::Kernel;
use super::maps::{Elements as _, SLOTS};
use crate::context::PacketCtx;
use crate::env::Words;
use crate::select::backend::{self, Picks};

type Ctx<F> = *mut PacketCtx<Words<Kernel<F>>>;

/// Returns an element of `slots`; `u64::MAX` if there is none. A subprogram, since selections look up slots in loops.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn slot(index: u32) -> u64 {
    // SAFETY: an integer in a map, which is read at once.
    SLOTS.at(index).map_or(u64::MAX, |id| u64::from(unsafe { *id }))
}

macro_rules! family {
    ($family:ty, $first:ident, $previous:ident, $rank:ident, $pick:ident, $select_for:ident, $tagged:ident, $has_tag:ident, $second_chance:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $first(service: *const ServiceEntry, selector: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(service) = (unsafe { service.as_ref() }) else { return 0 };
            backend::first_id(Kernel::<$family>::new(), service, selector)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $pick(service: *const ServiceEntry, selector: u32, client: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(service) = (unsafe { service.as_ref() }) else { return 0 };
            backend::select_id(Kernel::<$family>::new(), service, selector, client)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $select_for(ctx: Ctx<$family>, random: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(ctx) = (unsafe { ctx.as_mut() }) else { return 0 };
            backend::select_for(Kernel::<$family>::new(), ctx, random)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $tagged(ctx: Ctx<$family>) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(ctx) = (unsafe { ctx.as_mut() }) else { return 0 };
            backend::tagged(Kernel::<$family>::new(), ctx)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $second_chance(ctx: Ctx<$family>, id: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(ctx) = (unsafe { ctx.as_mut() }) else { return 0 };
            backend::second_chance(Kernel::<$family>::new(), ctx, id)
        }

        /// Subprogram for [`backend::previous_id`].
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $previous(service: *const ServiceEntry, selector: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(service) = (unsafe { service.as_ref() }) else { return 0 };
            backend::previous_id(Kernel::<$family>::new(), service, selector)
        }

        /// Subprogram for [`backend::rank`].
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $rank(
            service: *const ServiceEntry,
            id: u32,
            client: u32,
            random: u32,
        ) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(service) = (unsafe { service.as_ref() }) else { return backend::GONE };
            backend::rank(Kernel::<$family>::new(), service, id, client, random)
        }

        /// Subprogram for [`backend::has_tag`].
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(super) extern "C" fn $has_tag(service: *const ServiceEntry, id: u32, tag: u32, of: u32) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some(service) = (unsafe { service.as_ref() }) else { return 0 };
            backend::has_tag(Kernel::<$family>::new(), service, id, tag, of)
        }

        impl Picks for Kernel<$family> {
            #[inline(always)]
            fn pick(self, service: &ServiceEntry, selector: u32, client: u32) -> u32 {
                $pick(service, selector, client)
            }
        }
    };
}

family!(V4, first4, previous4, rank4, pick4, select_for4, tagged4, has_tag4, second_chance4);
family!(V6, first6, previous6, rank6, pick6, select_for6, tagged6, has_tag6, second_chance6);
