//! Expressions of nftables rules (`include/uapi/linux/netfilter/nf_tables.h`).

use super::message::{NESTED, nested};

/// `NFTA_LIST_ELEM`.
const ELEMENT: u16 = 1;
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`.
pub(super) const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
/// `NFT_REG_1`, `NFT_REG_VERDICT`.
const REGISTER: u32 = 1;
const VERDICT: u32 = 0;
/// `NFT_CT_STATE`, and the bits `NF_CT_STATE_INVALID_BIT` and `NF_CT_STATE_BIT(IP_CT_NEW)` of its result.
const CT_STATE: u32 = 0;
const STATE_INVALID: u32 = 1 << 0;
const STATE_NEW: u32 = 1 << 3;
/// `NFT_META_MARK`.
const META_MARK: u32 = 3;
/// `NFT_META_L4PROTO`.
const META_PROTOCOL: u32 = 16;
/// `NFT_PAYLOAD_TRANSPORT_HEADER`, and the offset of the flags in TCP's header.
const TRANSPORT_HEADER: u32 = 2;
const FLAGS_AT: u32 = 13;
/// The protocol TCP, and its flags.
const TCP: u8 = 6;
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
    // NFTA_CT_DREG, NFTA_CT_KEY.
    expression("ct", &[(1, &REGISTER.to_be_bytes()), (2, &CT_STATE.to_be_bytes())])
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
    let (mask, zero) = (value(bytes), value(&[0; 4][..bytes.len()]));
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

/// Masquerades the packets that the programs mark with this bit.
pub(super) fn masquerade_marked(mark: u32) -> Vec<u8> {
    [is_marked(mark), expression("masq", &[])].concat()
}

/// Drops the packets with this bit that belong to no connection by conntrack: they are not masqueraded, so the endpoint would answer
/// the client's address with a RST.
pub(super) fn drop_marked_invalid(mark: u32) -> Vec<u8> {
    [is_marked(mark), is_in_state(STATE_INVALID), expression("counter", &[]), drop_packet()].concat()
}

/// Continues the rule if the packet's mark has this bit.
fn is_marked(mark: u32) -> Vec<u8> {
    // NFTA_META_DREG, NFTA_META_KEY.
    let load = expression("meta", &[(1, &REGISTER.to_be_bytes()), (2, &META_MARK.to_be_bytes())]);
    has_bits(load, mark)
}

/// Continues the rule if conntrack's state of the packet is this one.
fn is_in_state(state: u32) -> Vec<u8> {
    has_bits(ct_state(), state)
}

/// Continues the rule if the number that `load` loads has any of these bits. The number is in the host's byte order, and the kernel
/// compares bytes.
fn has_bits(load: Vec<u8>, bits: u32) -> Vec<u8> {
    [load, mask(&bits.to_ne_bytes()), compare(NOT_EQUAL, &[0; 4])].concat()
}

fn drop_packet() -> Vec<u8> {
    let verdict = nested(&[(DATA_VERDICT | NESTED, &nested(&[(VERDICT_CODE, &DROP.to_be_bytes())]))]);
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA.
    expression("immediate", &[(1, &VERDICT.to_be_bytes()), (2 | NESTED, &verdict)])
}

/// Drops TCP packets that conntrack considers the first of their connection, and that are not a SYN.
pub(super) fn drop_unknown_tcp() -> Vec<u8> {
    let register = REGISTER.to_be_bytes();
    [
        // NFTA_META_DREG, NFTA_META_KEY.
        expression("meta", &[(1, &register), (2, &META_PROTOCOL.to_be_bytes())]),
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
