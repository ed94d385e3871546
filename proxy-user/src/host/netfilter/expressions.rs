//! Expressions of nftables rules (`include/uapi/linux/netfilter/nf_tables.h`).

use super::message::{NESTED, TCP, nested};
use crate::host::devices::LOOPBACK;

/// `NFTA_LIST_ELEM`.
const ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
pub(super) const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
/// `NFT_REG_1`, `NFT_REG_2`, `NFT_REG_VERDICT`.
const REGISTER: u32 = 1;
const REGISTER_2: u32 = 2;
const VERDICT: u32 = 0;
/// `NFT_CT_STATE`, and the bits `NF_CT_STATE_INVALID_BIT` and `NF_CT_STATE_BIT(IP_CT_NEW)` of its result.
const CT_STATE: u32 = 0;
const STATE_INVALID: u32 = 1 << 0;
const STATE_NEW: u32 = 1 << 3;
/// `NFT_CT_LABELS`.
const CT_LABELS: u32 = 13;
/// The bit of a connection's label that says that its packets are masqueraded. All programs of the network namespace share these
/// 128 bits. This is the highest: people number theirs from 0 (`connlabel.conf`), and OVN and Antrea, which use most of the bits,
/// do so in conntrack zones of their own.
const MASQUERADE_LABEL: u128 = 1 << 127;
/// `NFT_META_MARK`, `NFT_META_IIF`.
const META_MARK: u32 = 3;
const META_IIF: u32 = 4;
/// `NFT_META_L4PROTO`.
const META_PROTOCOL: u32 = 16;
/// `NFT_PAYLOAD_TRANSPORT_HEADER`, and the offset of the flags in TCP's header.
const TRANSPORT_HEADER: u32 = 2;
const FLAGS_AT: u32 = 13;
/// `NF_NAT_RANGE_PROTO_SPECIFIED` (`uapi/linux/netfilter/nf_nat.h`).
const PROTO_SPECIFIED: u32 = 1 << 1;
/// The first and the last source port of masqueraded UDP: all above the node ports.
const MASQUERADE_PORTS: [u16; 2] = [32768, 65535];
/// The protocol UDP, and TCP's flags.
const UDP: u8 = 17;
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
/// `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT` with `NFTA_VERDICT_CODE`.
const VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
/// `NFT_CMP_EQ`, `NFT_CMP_NEQ`.
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
/// `NF_DROP`.
const DROP: u32 = 0;

/// Encodes an expression with these attributes.
pub(super) fn expression(name: &str, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let name = [name.as_bytes(), &[0]].concat();
    let data = nested(attributes);
    nested(&[(ELEMENT | NESTED, &nested(&[(EXPRESSION_NAME, &name), (EXPRESSION_DATA | NESTED, &data)]))])
}

/// Encodes bytes to compare with or to mask with.
fn value(bytes: &[u8]) -> Vec<u8> {
    nested(&[(VALUE, bytes)])
}

/// Loads conntrack's state of the packet's connection into the register.
pub(super) fn ct_state() -> Vec<u8> {
    load("ct", CT_STATE)
}

/// Loads a field of the packet (`meta`) or of its connection (`ct`) into the register.
fn load(from: &str, key: u32) -> Vec<u8> {
    // NFTA_META_DREG, _KEY; NFTA_CT_DREG, _KEY.
    expression(from, &[(1, &REGISTER.to_be_bytes()), (2, &key.to_be_bytes())])
}

/// Continues the rule if the register is, or is not, equal to `with`.
fn compare(operation: u32, with: &[u8]) -> Vec<u8> {
    // NFTA_CMP_SREG, NFTA_CMP_OP, NFTA_CMP_DATA.
    let to = value(with);
    expression("cmp", &[(1, &REGISTER.to_be_bytes()), (2, &operation.to_be_bytes()), (3 | NESTED, &to)])
}

/// Masks the register with `bytes`.
fn mask(bytes: &[u8]) -> Vec<u8> {
    let register = REGISTER.to_be_bytes();
    let (mask, zero) = (value(bytes), value(&vec![0; bytes.len()]));
    // NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR.
    expression(
        "bitwise",
        &[
            (1, &register),
            (2, &register),
            (3, &(bytes.len() as u32).to_be_bytes()),
            (4 | NESTED, &mask),
            (5 | NESTED, &zero),
        ],
    )
}

/// The rules that masquerade the packets that the programs mark with this bit.
pub(super) fn masquerade_marked(mark: u32) -> [Vec<u8>; 2] {
    masquerade(&is_marked(mark))
}

/// The rules that masquerade the packets that `select` selects. UDP gets a port that is no node port: MASQUERADE keeps the client's
/// port, and a socket program would take the answer of a pod to the node's address and such a port for a call of the Service.
fn masquerade(select: &[u8]) -> [Vec<u8>; 2] {
    let [first, last] = MASQUERADE_PORTS.map(u16::to_be_bytes);
    let to_ports = [
        load("meta", META_PROTOCOL),
        compare(EQUAL, &[UDP]),
        immediate(REGISTER, &value(&first)),
        immediate(REGISTER_2, &value(&last)),
        // NFTA_MASQ_FLAGS, _REG_PROTO_MIN, _REG_PROTO_MAX.
        expression(
            "masq",
            &[
                (1, &PROTO_SPECIFIED.to_be_bytes()),
                (2, &REGISTER.to_be_bytes()),
                (3, &REGISTER_2.to_be_bytes()),
            ],
        ),
    ]
    .concat();
    [[select, &to_ports].concat(), [select, &expression("masq", &[])].concat()]
}

/// Copies this bit of the packet's mark to the connection's label; the other bits of the label stay.
pub(super) fn label_marked(mark: u32) -> Vec<u8> {
    let register = REGISTER.to_be_bytes();
    // NFTA_CT_KEY, NFTA_CT_SREG.
    let set = expression("ct", &[(2, &CT_LABELS.to_be_bytes()), (4, &register)]);
    [is_marked(mark), immediate(REGISTER, &value(&MASQUERADE_LABEL.to_ne_bytes())), set].concat()
}

/// The rules that masquerade the packets whose connection has the label.
pub(super) fn masquerade_labelled() -> [Vec<u8>; 2] {
    masquerade(&has_bits(load("ct", CT_LABELS), &MASQUERADE_LABEL.to_ne_bytes()))
}

/// Exempts packets that arrive on the loopback device from conntrack, except those that it has already seen where they were sent.
pub(super) fn notrack_loopback() -> Vec<u8> {
    let is_loopback = compare(EQUAL, &LOOPBACK.to_ne_bytes());
    [load("meta", META_IIF), is_loopback, expression("notrack", &[])].concat()
}

/// Drops the packets with this bit that belong to no connection by conntrack: they are not masqueraded, so the endpoint would answer
/// the client's address with a RST.
pub(super) fn drop_marked_invalid(mark: u32) -> Vec<u8> {
    [is_marked(mark), is_in_state(STATE_INVALID), expression("counter", &[]), drop_packet()].concat()
}

/// Continues the rule if the packet's mark has this bit.
fn is_marked(mark: u32) -> Vec<u8> {
    has_bits(load("meta", META_MARK), &mark.to_ne_bytes())
}

/// Continues the rule if conntrack's state of the packet is this one.
fn is_in_state(state: u32) -> Vec<u8> {
    has_bits(ct_state(), &state.to_ne_bytes())
}

/// Continues the rule if the number that `load` loads has any of these bits. The number is in the host's byte order, and the kernel
/// compares bytes.
fn has_bits(load: Vec<u8>, bits: &[u8]) -> Vec<u8> {
    [load, mask(bits), compare(NOT_EQUAL, &vec![0; bits.len()])].concat()
}

fn drop_packet() -> Vec<u8> {
    verdict(&[(VERDICT_CODE, &DROP.to_be_bytes())])
}

/// Ends the rule with the verdict that these attributes tell.
pub(super) fn verdict(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    immediate(VERDICT, &nested(&[(DATA_VERDICT | NESTED, &nested(attributes))]))
}

/// Sets a register.
fn immediate(register: u32, data: &[u8]) -> Vec<u8> {
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    expression("immediate", &[(1, &register.to_be_bytes()), (2 | NESTED, data)])
}

/// Drops TCP packets that conntrack considers the first of their connection, and that are not a SYN.
pub(super) fn drop_unknown_tcp() -> Vec<u8> {
    let register = REGISTER.to_be_bytes();
    [
        load("meta", META_PROTOCOL),
        compare(EQUAL, &[TCP]),
        // NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN.
        expression(
            "payload",
            &[
                (1, &register),
                (2, &TRANSPORT_HEADER.to_be_bytes()),
                (3, &FLAGS_AT.to_be_bytes()),
                (4, &1u32.to_be_bytes()),
            ],
        ),
        mask(&[FIN | SYN | RST | ACK]),
        compare(NOT_EQUAL, &[SYN]),
        is_in_state(STATE_NEW),
        drop_packet(),
    ]
    .concat()
}
