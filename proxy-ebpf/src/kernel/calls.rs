//! The kernel's side of the [list of calls](crate::calls): global functions, and the methods that call them.
//!
//! A global function gets pointers and numbers, and returns a number.

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use proxy_common::flow::FlowKey;
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;
use proxy_common::{V4, V6};

use super::handle::Kernel;
use super::skb::Skb;
use super::xdp::Xdp;
use crate::calls::{
    direct, early_calls, flow_calls, health_calls, new_flow_calls, node_calls, routing_calls, service_calls,
    stage_calls,
};
use crate::context::{Packet, PacketCtx, Tuple};
use crate::early::EarlyStages;
use crate::frame::{Fib, HelperFailed, Route};
use crate::header;
use crate::parse::{Parsed, Stop};
use crate::pipeline::Stages;
use crate::stage::direct::DirectCase;
use crate::stage::established::Lookup;
use crate::stage::existing::{Existing, NewFlows};
use crate::stage::forward::Routing;
use crate::stage::refuse::Refusal;
use crate::stage::sctp;
use crate::step::{Step, StepCode};

/// An argument of a global function.
pub trait Argument: Sized {
    /// A number or a pointer.
    type Raw;
    /// Returns the argument as the caller passes it.
    fn raw(self) -> Self::Raw;
    /// Returns the argument of a function; `None` for a null pointer, which no caller passes.
    ///
    /// # Safety
    /// A pointer has to be null or valid for the whole call, as the verifier guarantees for each caller of a global function.
    unsafe fn of(raw: Self::Raw) -> Option<Self>;
}

/// The result of a global function.
pub trait Returned {
    /// The number that a global function returns.
    type Code: Default;
    /// Returns the result as a number.
    fn encode(self) -> Self::Code;
    /// Returns the result that was encoded as this number.
    fn decode(code: Self::Code) -> Self;
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(
            impl Argument for $number {
                type Raw = Self;
                #[inline(always)]
                fn raw(self) -> Self {
                    self
                }
                #[inline(always)]
                unsafe fn of(raw: Self) -> Option<Self> {
                    Some(raw)
                }
            }

            impl Returned for $number {
                type Code = Self;
                #[inline(always)]
                fn encode(self) -> Self {
                    self
                }
                #[inline(always)]
                fn decode(code: Self) -> Self {
                    code
                }
            }
        )*
    };
}

numbers!(u32, u64);

/// Implements [`Argument`] for a type that is passed as another one.
macro_rules! argument {
    ($type:ty as $raw:ty: |$value:ident| $to:expr, |$number:ident| $from:expr) => {
        impl Argument for $type {
            type Raw = $raw;
            #[inline(always)]
            fn raw(self) -> $raw {
                let $value = self;
                $to
            }
            #[inline(always)]
            unsafe fn of($number: $raw) -> Option<Self> {
                Some($from)
            }
        }
    };
}

argument!(bool as u32: |value| u32::from(value), |number| number != 0);
argument!(Skb as *mut __sk_buff: |frame| Skb::raw(frame), |raw| Skb::from_raw(raw));
argument!(Xdp as *mut xdp_md: |frame| Xdp::raw(frame), |raw| Xdp::from_raw(raw));
argument!(DirectCase as u32: |case| case as u32, |number| Self::decode(number));
argument!(Lookup as u32: |lookup| u32::from(lookup == Self::Again), |number| {
    if number != 0 { Self::Again } else { Self::First }
});
argument!(Refusal as u32: |refusal| refusal as u32, |number| match number {
    0 => Self::PortUnreachable,
    1 => Self::TooBig,
    2 => Self::TimeExceeded,
    _ => Self::Unreachable,
});

impl<T> Argument for &T {
    type Raw = *const T;
    #[inline(always)]
    fn raw(self) -> *const T {
        self
    }
    #[inline(always)]
    unsafe fn of(raw: *const T) -> Option<Self> {
        // SAFETY: the caller guarantees that the pointer is null or valid.
        unsafe { raw.as_ref() }
    }
}

impl<T> Argument for &mut T {
    type Raw = *mut T;
    #[inline(always)]
    fn raw(self) -> *mut T {
        self
    }
    #[inline(always)]
    unsafe fn of(raw: *mut T) -> Option<Self> {
        // SAFETY: the caller guarantees that the pointer is null or valid, and has the only reference.
        unsafe { raw.as_mut() }
    }
}

/// Implements [`Returned`] for a type that is returned as a 32-bit number.
macro_rules! returned {
    ($type:ty: |$value:ident| $to:expr, |$number:ident| $from:expr) => {
        impl Returned for $type {
            type Code = u32;
            #[inline(always)]
            fn encode(self) -> u32 {
                let $value = self;
                $to
            }
            #[inline(always)]
            fn decode($number: u32) -> Self {
                $from
            }
        }
    };
}

returned!((): |_value| 0, |_number| ());
returned!(bool: |value| u32::from(value), |number| number != 0);
returned!(Step: |step| step.encode(), |number| Self::decode(number));
returned!(StepCode: |code| code.0, |number| Self(number));
returned!(Existing: |existing| existing as u32, |number| match number {
    0 => Self::None,
    1 => Self::GoesOn,
    2 => Self::LostReplyKey,
    _ => Self::Retried,
});
returned!(Fib: |fib| fib as u32, |number| match number {
    0 => Self::Found,
    1 => Self::TooBig,
    2 => Self::NoRoute,
    _ => Self::Unreachable,
});
returned!(Parsed: |parsed| parsed as u32, |number| match number {
    0 => Self::Packet,
    1 => Self::Icmp,
    2 => Self::Tunnel,
    3 => Self::Foreign,
    _ => Self::Dropped,
});

impl Returned for Result<(), Stop> {
    /// 0 for success, otherwise the reason's number plus one.
    type Code = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            Ok(()) => 0,
            Err(Stop::Refused(reason)) => reason as u32 + 1,
            Err(_) => Reason::Malformed as u32 + 1,
        }
    }

    #[inline(always)]
    fn decode(code: u32) -> Self {
        const ALONE: u32 = Reason::FragmentWithoutFirst as u32 + 1;
        const FOREIGN: u32 = Reason::Fragment as u32 + 1;
        match code {
            0 => Ok(()),
            ALONE => Err(Stop::Refused(Reason::FragmentWithoutFirst)),
            FOREIGN => Err(Stop::Refused(Reason::Fragment)),
            _ => Err(Stop::Refused(Reason::Malformed)),
        }
    }
}

/// Makes a global function for each line of a list, with the handle of a family. Its symbol is the method's name between
/// `$before` and `$after`.
macro_rules! global {
    (
        [$family:ty, $before:literal, $after:literal]
        $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $($path:ident)::+;)*
    ) => {
        $(
            #[unsafe(export_name = concat!($before, stringify!($name), $after))]
            #[inline(never)]
            pub extern "C" fn $name($($argument: <$type as Argument>::Raw),*) -> <$result as Returned>::Code {
                // SAFETY: the verifier lets callers pass memory of that size, or null.
                $(let Some($argument) = (unsafe { <$type as Argument>::of($argument) }) else { return 0 };)*
                let result: $result = $crate::$($path)::+(Kernel::<$family>::new() $(, $argument)*).into();
                result.encode()
            }
        )*
    };
}

/// Implements the methods of a list by calls of the global functions in a module.
macro_rules! through_global {
    (
        [$module:ident]
        $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $($path:ident)::+;)*
    ) => {
        $(
            #[inline(always)]
            fn $name(self $(, $argument: $type)*) -> $result {
                use $crate::kernel::calls::{Argument, Returned};
                <$result as Returned>::decode($crate::kernel::calls::$module::$name($(Argument::raw($argument)),*))
            }
        )*
    };
}

pub(super) use through_global;

/// The functions that both families share.
pub(super) mod both {
    use super::{Argument, Kernel, Returned, V4, health_calls};

    health_calls!(global!(V4, "", ""));
}

/// The functions of a family; those of XDP are in a module of their own, since they get another kind of frame.
macro_rules! family {
    ($module:ident, $xdp:ident, $family:ty, $words:ty, $suffix:literal) => {
        pub(super) mod $module {
            use super::*;

            node_calls!(global!($family, "", $suffix), $words);
            service_calls!(global!($family, "", $suffix), $words);
            flow_calls!(global!($family, "", $suffix), $words);
            routing_calls!(global!($family, "", $suffix), $words, Skb);
            new_flow_calls!(global!($family, "", $suffix), $words, Skb);
            stage_calls!(global!($family, "", $suffix), $words, Skb);
        }

        pub(super) mod $xdp {
            use super::*;

            early_calls!(global!($family, "xdp_", $suffix), $words, Xdp);
        }

        impl Routing<Skb> for Kernel<$family> {
            routing_calls!(through_global!($module), $words, Skb);
        }

        impl NewFlows<Skb> for Kernel<$family> {
            new_flow_calls!(through_global!($module), $words, Skb);
        }

        impl Stages<Skb> for Kernel<$family> {
            stage_calls!(through_global!($module), $words, Skb);
        }

        impl Routing<Xdp> for Kernel<$family> {
            routing_calls!(direct!(), $words, Xdp);
        }

        impl NewFlows<Xdp> for Kernel<$family> {
            new_flow_calls!(direct!(), $words, Xdp);
        }

        impl EarlyStages<Xdp> for Kernel<$family> {
            early_calls!(through_global!($xdp), $words, Xdp);
        }
    };
}

family!(v4, xdp4, V4, [u32; 1], "4");
family!(v6, xdp6, V6, [u32; 4], "6");

/// Subprogram for [`header::walk_extensions`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_extensions(skb: *mut __sk_buff, proto: u32, offset: u32) -> u64 {
    header::walk_extensions(Skb::from_raw(skb), proto as u8, offset)
}

/// Subprogram for [`sctp::change_ports`]. Returns 0 for success.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn sctp_ports(skb: *mut __sk_buff, at: u32, end: u32, old: u32, new: u32) -> i32 {
    i32::from(sctp::change_ports(Skb::from_raw(skb), at, end, old, new) == Err(HelperFailed))
}
