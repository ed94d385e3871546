//! Instructions that `core` does not offer on the BPF target: atomic additions and exchanges.

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

/// Writes `new` where `old` stands, and gives what stood there (BPF instruction set v3, Linux 5.12). It is a full
/// barrier: whoever sees the new value sees all that was written before it.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn compare_exchange(place: *mut u64, old: u64, new: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut found = old;
        // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
        unsafe {
            core::arch::asm!(
                "r0 = cmpxchg_64({p} + 0, r0, {n})",
                p = in(reg) place,
                n = in(reg) new,
                inout("r0") found,
            );
        }
        found
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        use core::sync::atomic::{AtomicU64, Ordering};
        let place = AtomicU64::from_ptr(place);
        match place.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(found) | Err(found) => found,
        }
    }
}

/// The same for 32 bits.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn compare_exchange32(place: *mut u32, old: u32, new: u32) -> u32 {
    #[cfg(target_arch = "bpf")]
    {
        let mut found = u64::from(old);
        // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
        unsafe {
            core::arch::asm!(
                "w0 = cmpxchg32_32({p} + 0, w0, w2)",
                p = in(reg) place,
                in("r2") u64::from(new),
                inout("r0") found,
            );
        }
        found as u32
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        use core::sync::atomic::{AtomicU32, Ordering};
        let place = AtomicU32::from_ptr(place);
        match place.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(found) | Err(found) => found,
        }
    }
}

/// The same number, of which the compiler knows nothing any more: it makes branches of sums that compare.
#[inline(always)]
pub fn opaque(number: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut number = number;
        // SAFETY: nothing happens. An instruction has to be there: line information is by instruction.
        unsafe { core::arch::asm!("{n} = {n}", n = inout(reg) number, options(pure, nomem, nostack)) };
        number
    }
    #[cfg(not(target_arch = "bpf"))]
    core::hint::black_box(number)
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
        // SAFETY: as above.
        unsafe {
            assert_eq!(super::compare_exchange(&raw mut counter, 9, 1), 10);
            assert_eq!(super::compare_exchange(&raw mut counter, 10, 1), 10);
        }
        assert_eq!(counter, 1);
        let mut small = 7u32;
        // SAFETY: as above.
        unsafe {
            assert_eq!(super::compare_exchange32(&raw mut small, 7, 8), 7);
            assert_eq!(super::compare_exchange32(&raw mut small, 7, 9), 8);
        }
        assert_eq!(small, 8);
    }
}
