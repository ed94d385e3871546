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

/// Defines [`Step`] and its numbers.
macro_rules! steps {
    ($($(#[doc = $doc:literal])+ $step:ident = $code:literal,)+) => {
        /// The result of a stage.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Step {
            $($(#[doc = $doc])+ $step,)+
            /// Verdict: the packet is dropped for this reason, which is still to be counted.
            DropFor(Reason),
            /// Verdict: the packet was sent; this is the program's verdict.
            Sent(i32),
        }

        impl Step {
            /// The steps without a payload.
            #[cfg(test)]
            const PLAIN: &[Self] = &[$(Self::$step),+];

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

steps! {
    /// Verdict: the packet passes, to the next program, and then up the stack or out of the device.
    Pass = 0,
    /// Verdict: the packet is dropped; the stage has counted the reason.
    Drop = 1,
    /// The packet may belong to a flow.
    Established = 2,
    /// The packet's flow exists: the flow of a SYN was found, or a flow has just begun.
    Continue = 3,
    /// The packet's flow has no reply key in `flow_index`.
    RepairReplyKey = 4,
    /// The packet may be the reply to a packet with SNAT.
    SnatReply = 5,
    /// An egress packet that may be a backend's reply.
    Reply = 15,
    /// A packet that is addressed directly to an endpoint.
    Direct = 6,
    /// An egress packet that is addressed directly to an endpoint, and whose source may be a SNAT port of this node.
    DirectEgress = 16,
    /// An egress packet whose source may be a frontend's address and port, and that is no backend's reply.
    DirectFrontendSource = 24,
    /// A backend's packet of a direct connection, which its client opened to the endpoint's address and which has no flow.
    DirectReply = 17,
    /// The packet belongs to no flow.
    NewFlow = 7,
    /// The packet may begin the planned flow.
    OpenFlow = 8,
    /// The packet's flow has begun; the packet is to be translated by the plan.
    Translate = 14,
    /// The packet is translated; it is to be sent by the route in the context.
    Forward = 9,
    /// The packet is translated; it is to be redirected to the ingress of the route's device.
    DeliverLocal = 10,
    /// An ICMP packet.
    Icmp = 11,
    /// An ICMP packet that is no error, while echo requests are answered.
    EchoRequest = 25,
    /// The client is to get an ICMP error: the destination has no endpoint.
    Refuse = 12,
    /// The client is to get an ICMP error: the packet is too big.
    TooBig = 13,
    /// The client is to get an ICMP error: the packet's time to live has expired.
    TimeExceeded = 26,
    /// The client is to get an ICMP error: the route of its packet leads nowhere.
    Unreachable = 28,
    /// The connection is to be reset, since its endpoint was removed.
    Reset = 23,
    /// The connection moves to another endpoint: the packet is to become the RST for the present one.
    Move = 27,
    /// The packet is to be encapsulated, and sent to the node of its endpoint.
    Encapsulate = 18,
    /// A packet inside another packet, perhaps from another node.
    Tunnel = 19,
    /// A packet that another node has encapsulated; the outer header is removed.
    Tunnelled = 20,
    /// The backend refuses the connection. The packet may be dropped, if another backend can take the connection.
    Refused = 21,
    /// An ICMP error by which the backend refuses the connection; otherwise as [`Step::Refused`].
    RefusedByIcmp = 22,
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
    fn contributing_example_has_a_free_number() {
        let guide = include_str!("../../CONTRIBUTING.md");
        let number = guide.split("Example = ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
        let number: u32 = number.parse().unwrap();
        assert!(number < DROP_FOR && Step::PLAIN.iter().all(|step| step.encode() != number), "{number}");
    }

    #[test]
    fn every_step_is_decoded_as_it_was_encoded() {
        let reasons = Reason::ALL.iter().map(|reason| Step::DropFor(*reason));
        let plain = Step::PLAIN.iter().copied().chain([Step::Sent(7), Step::Sent(NEXT)]);
        for step in plain.chain(reasons) {
            assert_eq!(Step::decode(step.encode()), step);
        }
        assert_eq!(Step::decode(u32::MAX), Step::DropFor(Reason::MapInconsistent));
    }
}
