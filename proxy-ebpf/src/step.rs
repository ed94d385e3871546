//! What a stage says of a packet: where it goes next, or what becomes of it.

use proxy_common::reason::Reason;

/// `TCX_NEXT`, which is also `TC_ACT_UNSPEC`: on to the next program.
pub const NEXT: i32 = -1;
/// `TCX_DROP`, `TC_ACT_SHOT`.
pub const DROP: i32 = 2;

/// `XDP_DROP`.
pub const XDP_DROP: u32 = 1;
/// `XDP_PASS`: on to tc, as it came.
pub const XDP_PASS: u32 = 2;
/// `XDP_TX`: out by the device that it came in by.
pub const XDP_TX: u32 = 3;

/// The outcome of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It goes on as it is: to the next program, then up the stack or out of the device.
    Pass,
    /// It is dropped; the stage that says so has counted it.
    Drop,
    /// It is dropped for this reason, which is yet to be counted.
    DropFor(Reason),
    /// It may belong to a flow.
    Established,
    /// Its flow exists, and goes on: a segment that asks for a connection, or one whose flow has just begun.
    Continue,
    /// Its flow has lost the key of its replies.
    RepairReplyKey,
    /// It may be the reply to a packet that was forwarded under an address of this node.
    SnatReply,
    /// It is on its way out, and may be a backend's reply.
    Reply,
    /// It goes straight to an endpoint.
    Direct,
    /// It goes straight to an endpoint, out of here, under an address and port that packets are forwarded under.
    DirectOut,
    /// It leaves from here under an address and port that may be a frontend's, and is not a backend's reply.
    DirectOwn,
    /// It is a backend's, and of a connection that its client made straight to it, and that no flow knows of.
    DirectReply,
    /// It belongs to no flow.
    NewFlow,
    /// It may begin the flow that was planned.
    OpenFlow,
    /// Its flow has begun, and it is to be translated by the plan.
    Translate,
    /// It is translated, and is to be sent by the route that was found.
    Forward,
    /// It is translated, and is to come in by the device of the route that was found.
    DeliverLocal,
    /// It is an ICMP packet, on its way in.
    Icmp,
    /// Its client is to be told that its destination has no endpoint.
    Refuse,
    /// Its client is to be told that it is too big.
    TooBig,
    /// Its connection is to be reset: the endpoint has left.
    Reset,
    /// It is to be encapsulated to the node of its endpoint, and sent there.
    Encapsulate,
    /// It is a packet in a packet, perhaps from another node.
    Tunnel,
    /// It was in a packet that another node sent.
    Tunnelled,
    /// Its backend refuses the connection: it may be dropped, if another one can have it.
    Refused,
    /// It is an ICMP error that says the same.
    Unreachable,
    /// It has been sent: a program's verdict.
    Sent(i32),
}

/// A [`Step`] as a number, as it comes from a BPF-to-BPF call. The dispatcher keeps it as it came: taken apart and put together again
/// at each call, every step would be a state of its own to the verifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCode(pub u32);

impl From<Step> for StepCode {
    #[inline(always)]
    fn from(step: Step) -> Self {
        Self(step.encode())
    }
}

impl From<StepCode> for Step {
    #[inline(always)]
    fn from(code: StepCode) -> Self {
        Self::decode(code.0)
    }
}

macro_rules! codes {
    ($($step:ident = $code:literal),+ $(,)?) => {
        impl Step {
            /// The step as a number, for a BPF-to-BPF call: a code in the low byte, what belongs to it above.
            #[inline(always)]
            pub const fn encode(self) -> u32 {
                match self {
                    $(Self::$step => $code,)+
                    Self::DropFor(reason) => DROP_FOR | (reason as u32) << 8,
                    Self::Sent(verdict) => SENT | verdict.cast_unsigned() << 8,
                }
            }

            /// The step of that number; of a number that is none, a drop.
            #[inline(always)]
            pub fn decode(number: u32) -> Self {
                match number & 0xff {
                    $($code => Self::$step,)+
                    SENT => Self::Sent(number.cast_signed() >> 8),
                    _ => Self::DropFor(reason(number >> 8)),
                }
            }
        }
    };
}

const DROP_FOR: u32 = 100;
const SENT: u32 = 101;

codes! {
    Pass = 0,
    Drop = 1,
    Established = 2,
    Continue = 3,
    RepairReplyKey = 4,
    SnatReply = 5,
    Direct = 6,
    NewFlow = 7,
    OpenFlow = 8,
    Forward = 9,
    DeliverLocal = 10,
    Icmp = 11,
    Refuse = 12,
    TooBig = 13,
    Translate = 14,
    Reply = 15,
    DirectOut = 16,
    DirectReply = 17,
    Encapsulate = 18,
    Tunnel = 19,
    Tunnelled = 20,
    Refused = 21,
    Unreachable = 22,
    Reset = 23,
    DirectOwn = 24,
}

/// The reason of that number, without a table: kernels before 6.4 forget the bounds of an index that the compiler keeps on
/// the stack.
#[inline(always)]
fn reason(number: u32) -> Reason {
    if number < Reason::COUNT {
        // SAFETY: the enum is `repr(u32)` and its numbers are 0 to `COUNT` - 1 (a test of `proxy_common` proves it).
        unsafe { core::mem::transmute::<u32, Reason>(number) }
    } else {
        Reason::MapInconsistent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_decoded_as_it_was_encoded() {
        let reasons = Reason::ALL.iter().map(|reason| Step::DropFor(*reason));
        let plain = [
            Step::Pass,
            Step::Drop,
            Step::Established,
            Step::Continue,
            Step::RepairReplyKey,
            Step::SnatReply,
            Step::Reply,
            Step::Direct,
            Step::DirectOut,
            Step::DirectOwn,
            Step::DirectReply,
            Step::NewFlow,
            Step::OpenFlow,
            Step::Translate,
            Step::Forward,
            Step::DeliverLocal,
            Step::Icmp,
            Step::Refuse,
            Step::TooBig,
            Step::Encapsulate,
            Step::Tunnel,
            Step::Tunnelled,
            Step::Refused,
            Step::Unreachable,
            Step::Reset,
            Step::Sent(7),
            Step::Sent(NEXT),
        ];
        for step in plain.into_iter().chain(reasons) {
            assert_eq!(Step::decode(step.encode()), step);
        }
        assert_eq!(Step::decode(u32::MAX), Step::DropFor(Reason::MapInconsistent));
    }
}
