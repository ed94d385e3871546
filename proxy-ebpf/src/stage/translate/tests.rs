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

#[test]
fn a_folded_difference_is_the_same_sum() {
    for difference in
        [0, 1, 0xffff_ffff, 1 << 32, 0x1_ffff_ffff, 0xffff_fffe_ffff_ffff, u64::MAX, 0x1234_5678_9abc_def0]
    {
        assert_eq!(u64::from(fold32(difference)) % 0xffff_ffff, difference % 0xffff_ffff, "{difference:#x}");
    }
}
