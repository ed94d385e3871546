//! Atomic additions. The BPF target has the instructions, but `core` does not offer them there.

/// Adds to a counter that several CPUs write.
///
/// # Safety
/// `counter` must be valid for reads and writes, and aligned.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    #[cfg(target_arch = "bpf")]
    // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
    unsafe {
        core::arch::asm!("lock *(u64 *)({p} + 0) += {v}", p = in(reg) counter, v = in(reg) value);
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(counter)
            .fetch_add(value, core::sync::atomic::Ordering::Relaxed);
    }
}

/// Adds, and gives what was there before (BPF instruction set v3, Linux 5.12).
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn fetch_add(counter: *mut u64, value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut result = value;
        // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
        unsafe {
            core::arch::asm!(
                "{v} = atomic_fetch_add((u64 *)({p} + 0), {v})",
                p = in(reg) counter,
                v = inout(reg) result,
            );
        }
        result
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(counter)
            .fetch_add(value, core::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_counter_adds_up() {
        let mut counter = 5u64;
        // SAFETY: a local that is alive and aligned.
        unsafe {
            super::add(&raw mut counter, 2);
            assert_eq!(super::fetch_add(&raw mut counter, 3), 7);
        }
        assert_eq!(counter, 10);
    }
}
