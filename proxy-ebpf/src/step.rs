//! The result of a stage: the next stage of a packet, or its verdict.

use proxy_common::reason::Reason;

/// `TCX_NEXT`, which is also `TC_ACT_UNSPEC`: the next program continues.
pub const NEXT: i32 = -1;
/// `TCX_DROP`, `TC_ACT_SHOT`.
pub const DROP: i32 = 2;

/// `XDP_DROP`.
pub const XDP_DROP: u32 = 1;
/// `XDP_PASS`: the packet continues to tc, unchanged.
pub const XDP_PASS: u32 = 2;
/// `XDP_TX`: the packet leaves by the device on which it arrived.
pub const XDP_TX: u32 = 3;

/// The result of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Verdict: the packet passes, to the next program, and then up the stack or out of the device.
    Pass,
    /// Verdict: the packet is dropped; the stage has counted the reason.
    Drop,
    /// Verdict: the packet is dropped for this reason, which is still to be counted.
    DropFor(Reason),
    /// The packet may belong to a flow.
    Established,
    /// The packet's flow exists: the flow of a SYN was found, or a flow has just begun.
    Continue,
    /// The packet's flow has no reply key in `flow_index`.
    RepairReplyKey,
    /// The packet may be the reply to a packet with SNAT.
    SnatReply,
    /// An egress packet that may be a backend's reply.
    Reply,
    /// A packet that is addressed directly to an endpoint.
    Direct,
    /// An egress packet that is addressed directly to an endpoint, and whose source may be a SNAT port of this node.
    DirectEgress,
    /// An egress packet whose source may be a frontend's address and port, and that is no backend's reply.
    DirectFrontendSource,
    /// A backend's packet of a direct connection, which its client opened to the endpoint's address and which has no flow.
    DirectReply,
    /// The packet belongs to no flow.
    NewFlow,
    /// The packet may begin the planned flow.
    OpenFlow,
    /// The packet's flow has begun; the packet is to be translated by the plan.
    Translate,
    /// The packet is translated; it is to be sent by the route in the context.
    Forward,
    /// The packet is translated; it is to be redirected to the ingress of the route's device.
    DeliverLocal,
    /// An ICMP packet.
    Icmp,
    /// An ICMP packet that is no error, while echo requests are answered.
    EchoRequest,
    /// The client is to get an ICMP error: the destination has no endpoint.
    Refuse,
    /// The client is to get an ICMP error: the packet is too big.
    TooBig,
    /// The connection is to be reset, since its endpoint was removed.
    Reset,
    /// The packet is to be encapsulated, and sent to the node of its endpoint.
    Encapsulate,
    /// A packet inside another packet, perhaps from another node.
    Tunnel,
    /// A packet that another node has encapsulated; the outer header is removed.
    Tunnelled,
    /// The backend refuses the connection. The packet may be dropped, if another backend can take the connection.
    Refused,
    /// An ICMP error by which the backend refuses the connection; otherwise as [`Step::Refused`].
    RefusedByIcmp,
    /// The packet was sent; this is the program's verdict.
    Sent(i32),
}

/// A stage that looks a packet up in the tables: all that an answer of the prefilter can lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// See [`Step::Established`].
    Established,
    /// See [`Step::SnatReply`].
    SnatReply,
    /// See [`Step::Reply`].
    Reply,
    /// See [`Step::Direct`].
    Direct,
    /// See [`Step::DirectEgress`].
    DirectEgress,
    /// See [`Step::DirectFrontendSource`].
    DirectFrontendSource,
}

impl From<Lookup> for Step {
    #[inline(always)]
    fn from(lookup: Lookup) -> Self {
        match lookup {
            Lookup::Established => Self::Established,
            Lookup::SnatReply => Self::SnatReply,
            Lookup::Reply => Self::Reply,
            Lookup::Direct => Self::Direct,
            Lookup::DirectEgress => Self::DirectEgress,
            Lookup::DirectFrontendSource => Self::DirectFrontendSource,
        }
    }
}

/// A [`Step`] as a number, the result of a BPF-to-BPF call. The dispatcher keeps the number: if it were decoded and encoded
/// again at each call, every step would be a separate state for the verifier.
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
            /// Returns the step as a number for a BPF-to-BPF call: the code in the low byte, the payload above it.
            #[inline(always)]
            pub const fn encode(self) -> u32 {
                match self {
                    $(Self::$step => $code,)+
                    Self::DropFor(reason) => DROP_FOR | (reason as u32) << 8,
                    Self::Sent(verdict) => SENT | verdict.cast_unsigned() << 8,
                }
            }

            /// Returns the step of a number; a drop if the number is invalid.
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
    DirectEgress = 16,
    DirectReply = 17,
    Encapsulate = 18,
    Tunnel = 19,
    Tunnelled = 20,
    Refused = 21,
    RefusedByIcmp = 22,
    Reset = 23,
    DirectFrontendSource = 24,
    EchoRequest = 25,
}

/// Returns the reason of a number, without a table: the verifier of kernels before 6.4 forgets the bounds of an index that
/// the compiler keeps on the stack.
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
            Step::DirectEgress,
            Step::DirectFrontendSource,
            Step::DirectReply,
            Step::NewFlow,
            Step::OpenFlow,
            Step::Translate,
            Step::Forward,
            Step::DeliverLocal,
            Step::Icmp,
            Step::EchoRequest,
            Step::Refuse,
            Step::TooBig,
            Step::Encapsulate,
            Step::Tunnel,
            Step::Tunnelled,
            Step::Refused,
            Step::RefusedByIcmp,
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
