//! BPF-to-BPF calls of the XDP program; see [`subprograms`](super::subprograms). XDP and tc share the subprograms that get
//! no packet.

use aya_ebpf::bindings::xdp_md;
use proxy_common::{V4, V6};

use super::handle::Kernel;
use super::xdp::Xdp;
use crate::context::PacketCtx;
use crate::early::{self, EarlyStages};
use crate::env::Words;
use crate::stage::established::Lookup;
use crate::stage::existing::{Existing, NewFlows};
use crate::stage::forward::Routing;
use crate::stage::new_flow;
use crate::stage::open_flow;
use crate::step::Step;

type Ctx<F> = *mut PacketCtx<Words<Kernel<F>>>;

/// Defines the global function of a stage: `name(more arguments)`, which returns the stage's [`Step`] as a number.
macro_rules! stage {
    ($family:ty, $name:ident($($argument:ident: $type:ty),*), |$maps:ident, $frame:ident, $ctx:ident| $body:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(md: *mut xdp_md, ctx: Ctx<$family> $(, $argument: $type)*) -> u32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let Some($ctx) = (unsafe { ctx.as_mut() }) else { return Step::Pass.encode() };
            let ($maps, $frame) = (Kernel::<$family>::new(), Xdp::from_raw(md));
            $body.encode()
        }
    };
}

macro_rules! family {
    ($family:ty, $established:ident, $snat_reply:ident, $new_flow:ident, $open_flow:ident) => {
        stage!($family, $established(again: u32), |maps, frame, ctx| {
            let lookup = if again != 0 { Lookup::Again } else { Lookup::First };
            early::established(maps, frame, ctx, lookup)
        });
        stage!($family, $snat_reply(), |maps, frame, ctx| early::snat_reply(maps, frame, ctx));
        stage!($family, $new_flow(), |maps, frame, ctx| new_flow::new_flow(maps, frame, ctx));
        stage!($family, $open_flow(), |maps, frame, ctx| open_flow::open_flow(maps, frame, ctx));

        impl Routing<Xdp> for Kernel<$family> {}

        impl NewFlows<Xdp> for Kernel<$family> {
            #[inline(always)]
            fn existing(self, ctx: &mut PacketCtx<Words<Self>>) -> Existing {
                open_flow::existing(self, ctx)
            }
        }

        impl EarlyStages<Xdp> for Kernel<$family> {
            #[inline(always)]
            fn established(self, frame: Xdp, ctx: &mut PacketCtx<Words<Self>>, lookup: Lookup) -> Step {
                Step::decode($established(frame.raw(), ctx, u32::from(lookup == Lookup::Again)))
            }

            #[inline(always)]
            fn snat_reply(self, frame: Xdp, ctx: &mut PacketCtx<Words<Self>>) -> Step {
                Step::decode($snat_reply(frame.raw(), ctx))
            }

            #[inline(always)]
            fn new_flow(self, frame: Xdp, ctx: &mut PacketCtx<Words<Self>>) -> Step {
                Step::decode($new_flow(frame.raw(), ctx))
            }

            #[inline(always)]
            fn open_flow(self, frame: Xdp, ctx: &mut PacketCtx<Words<Self>>) -> Step {
                Step::decode($open_flow(frame.raw(), ctx))
            }
        }
    };
}

family!(V4, xdp_known4, xdp_reply4, xdp_new4, xdp_open4);
family!(V6, xdp_known6, xdp_reply6, xdp_new6, xdp_open6);
