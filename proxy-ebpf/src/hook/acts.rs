//! The acts of the packet hooks, as functions of their own.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::reason::Reason;
use proxy_common::{V4, V6};

use super::begin::begin as first;
use super::beyond::back;
use super::tc::{known, mend, parse_pulled, reject, reply};
use crate::flow::Steps;
use crate::fragment::Fragments;
use crate::icmp::Control;
use crate::nat::Rewrite;
use crate::packet::Stop;
use crate::reject::Reject;
use crate::skb::Skb;

/// The acts, as functions that the verifier checks once each, on their own ("global"): walked through from
/// every state that calls them, they cost half a million steps.
pub(super) trait Acts: Rewrite + Steps + Reject + Control + Fragments {
    /// [`parse_pulled`].
    fn parse_pulled(skb: Skb) -> Result<(), Stop>;
    /// [`known`].
    fn known(skb: Skb, from: i32) -> i32;
    /// [`mend`].
    fn mend() -> i32;
    /// [`begin`].
    fn begin(skb: Skb) -> i32;
    /// [`reject`].
    fn reject(skb: Skb, what: i32) -> i32;
    /// [`back`].
    fn back(skb: Skb) -> i32;
    /// [`reply`].
    fn reply(skb: Skb, from: i32) -> i32;
}

/// Numbers for [`Stop`], and for "parsed".
const PARSED: i32 = 0;
const STOP_NOT_OURS: i32 = 1;
const STOP_FRAGMENT: i32 = 2;
const STOP_MALFORMED: i32 = 3;
const STOP_CONTROL: i32 = 4;
const STOP_ALONE: i32 = 5;

fn stop_number(result: Result<(), Stop>) -> i32 {
    match result {
        Ok(()) => PARSED,
        Err(Stop::NotOurs) => STOP_NOT_OURS,
        Err(Stop::Control) => STOP_CONTROL,
        Err(Stop::Because(Reason::Fragment)) => STOP_FRAGMENT,
        Err(Stop::Because(Reason::FragmentWithoutFirst)) => STOP_ALONE,
        Err(_) => STOP_MALFORMED,
    }
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

/// [`parse_pulled`], with a number for its result.
#[inline(always)]
fn parse_number<F: Acts>(skb: Skb) -> i32 {
    stop_number(parse_pulled::<F>(skb))
}

macro_rules! acts {
    ($family:ty, $parse:ident, $known:ident, $mend:ident, $begin:ident, $back:ident, $reject:ident, $reply:ident) => {
        global!($parse = parse_number::<$family>());
        global!($known = known::<$family>(from));
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $mend() -> i32 {
            mend::<$family>()
        }

        global!($begin = first::<$family>());
        global!($back = back::<$family>());
        global!($reject = reject::<$family>(what));
        global!($reply = reply::<$family>(from));

        impl Acts for $family {
            #[inline(always)]
            fn parse_pulled(skb: Skb) -> Result<(), Stop> {
                match $parse(skb.raw()) {
                    PARSED => Ok(()),
                    STOP_NOT_OURS => Err(Stop::NotOurs),
                    STOP_CONTROL => Err(Stop::Control),
                    STOP_FRAGMENT => Err(Stop::Because(Reason::Fragment)),
                    STOP_ALONE => Err(Stop::Because(Reason::FragmentWithoutFirst)),
                    _ => Err(Stop::Because(Reason::Malformed)),
                }
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
            fn reply(skb: Skb, from: i32) -> i32 {
                $reply(skb.raw(), from)
            }
        }
    };
}

acts!(V4, parse_pulled4, known4, mend4, begin4, back4, reject4, reply4);
acts!(V6, parse_pulled6, known6, mend6, begin6, back6, reject6, reply6);
