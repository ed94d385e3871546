//! Conversion of the results of subprograms to numbers and back: a global function cannot return any other type.

use proxy_common::reason::Reason;

use crate::frame::Fib;
use crate::parse::Parsed;
use crate::parse::Stop;

/// Returns the result of a fragment stage as a number: 0 for success, otherwise the reason's number plus one.
#[inline(always)]
pub fn encode_stop(result: Result<(), Stop>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(Stop::Refused(reason)) => reason as u32 + 1,
        Err(_) => Reason::Malformed as u32 + 1,
    }
}

/// Returns the result that [`encode_stop`] has encoded.
#[inline(always)]
pub fn decode_stop(number: u32) -> Result<(), Stop> {
    const ALONE: u32 = Reason::FragmentWithoutFirst as u32 + 1;
    const FOREIGN: u32 = Reason::Fragment as u32 + 1;
    match number {
        0 => Ok(()),
        ALONE => Err(Stop::Refused(Reason::FragmentWithoutFirst)),
        FOREIGN => Err(Stop::Refused(Reason::Fragment)),
        _ => Err(Stop::Refused(Reason::Malformed)),
    }
}

/// Returns the [`Parsed`] of this number.
#[inline(always)]
pub fn decode_parsed(number: u32) -> Parsed {
    match number {
        0 => Parsed::Packet,
        1 => Parsed::Icmp,
        3 => Parsed::Foreign,
        // `parse_pulled` never returns `Parsed::Tunnel`: a packet in a packet is never pulled.
        _ => Parsed::Dropped,
    }
}

/// Returns the [`Fib`] of this number.
#[inline(always)]
pub fn decode_fib(number: u32) -> Fib {
    match number {
        0 => Fib::Found,
        1 => Fib::TooBig,
        _ => Fib::NoRoute,
    }
}
