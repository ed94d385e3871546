//! The acts of the packet hooks, as functions of their own.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::{V4, V6};

use super::begin::{begin as first, goes_on};
use super::beyond::back;
use super::tc::{known, mend, parse_pulled, reject, reply};
use crate::flow::Steps;
use crate::fragment::Fragments;
use crate::icmp::Control;
use crate::nat::Rewrite;
use crate::reject::Reject;
use crate::skb::Skb;

/// The acts, as functions that the verifier checks once each, on their own ("global"): walked through from
/// every state that calls them, they cost half a million steps.
pub(super) trait Acts: Rewrite + Steps + Reject + Control + Fragments {
    /// [`parse_pulled`].
    fn parse_pulled(skb: Skb, direction: i32) -> i32;
    /// [`known`].
    fn known(skb: Skb, from: i32) -> i32;
    /// [`mend`].
    fn mend() -> i32;
    /// [`goes_on`].
    fn goes_on() -> u32;
    /// [`begin`].
    fn begin(skb: Skb) -> i32;
    /// [`reject`].
    fn reject(skb: Skb, what: i32) -> i32;
    /// [`back`].
    fn back(skb: Skb) -> i32;
    /// [`reply`].
    fn reply(skb: Skb) -> i32;
}

macro_rules! global {
    ($name:ident = $act:ident::<$family:ty>($($argument:ident)?)) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(skb: *mut __sk_buff $(, $argument: i32)?) -> i32 {
            $act::<$family>(Skb::from_raw(skb) $(, $argument)?)
        }
    };
}

macro_rules! acts {
    ($family:ty, $parse:ident, $known:ident, $mend:ident, $goes_on:ident, $begin:ident, $back:ident, $reject:ident, $reply:ident) => {
        global!($parse = parse_pulled::<$family>(direction));
        global!($known = known::<$family>(from));
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $mend() -> i32 {
            mend::<$family>()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $goes_on() -> u32 {
            goes_on::<$family>()
        }

        global!($begin = first::<$family>());
        global!($back = back::<$family>());
        global!($reject = reject::<$family>(what));
        global!($reply = reply::<$family>());

        impl Acts for $family {
            #[inline(always)]
            fn parse_pulled(skb: Skb, direction: i32) -> i32 {
                $parse(skb.raw(), direction)
            }

            #[inline(always)]
            fn known(skb: Skb, from: i32) -> i32 {
                $known(skb.raw(), from)
            }

            #[inline(always)]
            fn mend() -> i32 {
                $mend()
            }

            #[inline(always)]
            fn goes_on() -> u32 {
                $goes_on()
            }

            #[inline(always)]
            fn begin(skb: Skb) -> i32 {
                $begin(skb.raw())
            }

            #[inline(always)]
            fn reject(skb: Skb, what: i32) -> i32 {
                $reject(skb.raw(), what)
            }

            #[inline(always)]
            fn back(skb: Skb) -> i32 {
                $back(skb.raw())
            }

            #[inline(always)]
            fn reply(skb: Skb) -> i32 {
                $reply(skb.raw())
            }
        }
    };
}

acts!(V4, parse_pulled4, known4, mend4, goes_on4, begin4, back4, reject4, reply4);
acts!(V6, parse_pulled6, known6, mend6, goes_on6, begin6, back6, reject6, reply6);
