//! What subprograms give, as numbers: a global function returns nothing else.

use proxy_common::reason::Reason;

use crate::frame::Fib;
use crate::parse::Parsed;
use crate::parse::Stop;

/// A fragment's outcome as a number: 0 is done; else a reason, plus one.
#[inline(always)]
pub fn encode_stop(result: Result<(), Stop>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(Stop::Because(reason)) => reason as u32 + 1,
        Err(_) => Reason::Malformed as u32 + 1,
    }
}

/// The outcome of that number.
#[inline(always)]
pub fn decode_stop(number: u32) -> Result<(), Stop> {
    const ALONE: u32 = Reason::FragmentWithoutFirst as u32 + 1;
    const FOREIGN: u32 = Reason::Fragment as u32 + 1;
    match number {
        0 => Ok(()),
        ALONE => Err(Stop::Because(Reason::FragmentWithoutFirst)),
        FOREIGN => Err(Stop::Because(Reason::Fragment)),
        _ => Err(Stop::Because(Reason::Malformed)),
    }
}

/// How far parsing came, by its number.
#[inline(always)]
pub fn decode_parsed(number: u32) -> Parsed {
    match number {
        0 => Parsed::Packet,
        1 => Parsed::Icmp,
        3 => Parsed::Foreign,
        // Of what is in a packet, nothing is pulled.
        _ => Parsed::Dropped,
    }
}

/// What the routes say, by its number.
#[inline(always)]
pub fn decode_fib(number: u32) -> Fib {
    match number {
        0 => Fib::Found,
        1 => Fib::TooBig,
        _ => Fib::NoRoute,
    }
}
