use super::*;

#[test]
fn ports_stand_as_on_the_wire() {
    assert_eq!(ports(0x1234, 80).to_ne_bytes(), [0x12, 0x34, 0, 80]);
}

#[test]
fn the_difference_of_an_unchanged_address_is_nothing() {
    // In ones' complement all bits set is zero.
    assert_eq!(fold(address_difference(&[0x0a00_0001], &[0x0a00_0001])), 0xffff);
}
