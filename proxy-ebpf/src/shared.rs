//! Memory that several CPUs read and write at the same time. Every access goes through these traits, so that no code holds a
//! reference to the memory, and a model checker can run the same source with its own memory.
//!
//! # Ordering
//! [`Exchange::compare_exchange`] is a full barrier. Plain loads and stores are `READ_ONCE` and `WRITE_ONCE`: not torn, and
//! not ordered by themselves. If a reader relies on the order of two loads, the address of the second load depends on the
//! first load ([`after`]); every CPU on which Linux runs respects this dependency.

/// A shared integer.
pub trait Shared: Copy {
    /// Type of the integer.
    type Value: Copy + PartialEq;
    /// Reads the integer once.
    fn load(self) -> Self::Value;
    /// Reads the integer, after the loads from which `witness` was computed (acquire).
    fn load_after(self, witness: u64) -> Self::Value;
    /// Writes the integer once.
    fn store(self, value: Self::Value);
}

/// A shared integer with compare-and-exchange.
pub trait Exchange: Shared {
    /// Writes `new` if the integer is `old`; returns the previous value. A full barrier: a CPU that sees the new value sees
    /// all earlier writes.
    fn compare_exchange(self, old: Self::Value, new: Self::Value) -> Self::Value;
}

/// A shared integer at an address, in a map or in a test's own memory.
pub struct Raw<T>(*mut T);

impl<T> Clone for Raw<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

impl<T> Raw<T> {
    /// Returns a handle for the integer at this address.
    ///
    /// # Safety
    /// The address is aligned, and valid for reads and writes as long as the handle is used.
    #[inline(always)]
    pub unsafe fn new(address: *mut T) -> Self {
        Self(address)
    }
}

/// Returns zero, computed from `witness`. If the result is added to an address, the access depends on `witness`. x86 keeps
/// loads in order, and does not need this.
#[inline(always)]
pub fn after(witness: u64) -> usize {
    #[cfg(all(target_arch = "bpf", not(bpf_target_arch = "x86_64")))]
    {
        let mut zero = witness;
        // SAFETY: arithmetic on a register.
        unsafe { core::arch::asm!("{n} &= 0", n = inout(reg) zero, options(pure, nomem, nostack)) };
        zero as usize
    }
    #[cfg(not(all(target_arch = "bpf", not(bpf_target_arch = "x86_64"))))]
    {
        let _ = witness;
        #[cfg(not(target_arch = "bpf"))]
        core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire);
        0
    }
}

macro_rules! shared {
    ($($integer:ty)+) => {$(
        impl Shared for Raw<$integer> {
            type Value = $integer;

            #[inline(always)]
            fn load(self) -> $integer {
                // SAFETY: the constructor requires a valid address.
                unsafe { self.0.read_volatile() }
            }

            #[inline(always)]
            fn load_after(self, witness: u64) -> $integer {
                // SAFETY: as in `load`, since `after` returns zero.
                unsafe { self.0.byte_add(after(witness)).read_volatile() }
            }

            #[inline(always)]
            fn store(self, value: $integer) {
                // SAFETY: as in `load`.
                unsafe { self.0.write_volatile(value) };
            }
        }
    )+};
}

shared!(u16 u32 u64);

impl Exchange for Raw<u64> {
    #[inline(always)]
    fn compare_exchange(self, old: u64, new: u64) -> u64 {
        #[cfg(target_arch = "bpf")]
        {
            let mut found = old;
            // SAFETY: the constructor requires a valid address; the instruction touches nothing else.
            unsafe {
                core::arch::asm!(
                    "r0 = cmpxchg_64({p} + 0, r0, {n})",
                    p = in(reg) self.0,
                    n = in(reg) new,
                    inout("r0") found,
                );
            }
            found
        }
        #[cfg(not(target_arch = "bpf"))]
        {
            use core::sync::atomic::{AtomicU64, Ordering};
            // SAFETY: the constructor requires a valid address.
            let word = unsafe { AtomicU64::from_ptr(self.0) };
            match word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(found) | Err(found) => found,
            }
        }
    }
}

impl Exchange for Raw<u32> {
    #[inline(always)]
    fn compare_exchange(self, old: u32, new: u32) -> u32 {
        #[cfg(target_arch = "bpf")]
        {
            let mut found = u64::from(old);
            // SAFETY: the constructor requires a valid address; the instruction touches nothing else.
            unsafe {
                core::arch::asm!(
                    "w0 = cmpxchg32_32({p} + 0, w0, w2)",
                    p = in(reg) self.0,
                    in("r2") u64::from(new),
                    inout("r0") found,
                );
            }
            found as u32
        }
        #[cfg(not(target_arch = "bpf"))]
        {
            use core::sync::atomic::{AtomicU32, Ordering};
            // SAFETY: the constructor requires a valid address.
            let word = unsafe { AtomicU32::from_ptr(self.0) };
            match word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(found) | Err(found) => found,
            }
        }
    }
}

/// Adds `value` to a counter that several CPUs write.
///
/// # Safety
/// `counter` is aligned, and valid for reads and writes.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    #[cfg(target_arch = "bpf")]
    // SAFETY: the caller guarantees a valid pointer; the instruction touches nothing else.
    unsafe {
        core::arch::asm!("lock *(u64 *)({p} + 0) += {v}", p = in(reg) counter, v = in(reg) value);
    }
    #[cfg(not(target_arch = "bpf"))]
    // SAFETY: the caller guarantees a valid pointer.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(counter)
            .fetch_add(value, core::sync::atomic::Ordering::Relaxed);
    }
}

/// Adds `value` to a counter; returns the previous value (BPF instruction set v3, Linux 5.12).
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn fetch_add(counter: *mut u64, value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut result = value;
        // SAFETY: the caller guarantees a valid pointer; the instruction touches nothing else.
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
    // SAFETY: the caller guarantees a valid pointer.
    unsafe {
        core::sync::atomic::AtomicU64::from_ptr(counter)
            .fetch_add(value, core::sync::atomic::Ordering::Relaxed)
    }
}

/// Returns the same number, about which the compiler knows nothing. Otherwise the compiler turns sums of comparisons into
/// branches, and keeps values on the stack that could be computed again.
#[inline(always)]
pub fn opaque(number: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut number = number;
        // SAFETY: the instruction has no effect. It is needed, since line information belongs to instructions.
        unsafe { core::arch::asm!("{n} = {n}", n = inout(reg) number, options(pure, nomem, nostack)) };
        number
    }
    #[cfg(not(target_arch = "bpf"))]
    core::hint::black_box(number)
}

/// Returns the same number, about which the verifier knows nothing. Otherwise each value that the verifier can distinguish is
/// a separate state, with which the verifier walks through all following code. `noise` is any number that the verifier does
/// not know.
#[inline(always)]
pub fn opaque_to_verifier(number: u64, noise: u64) -> u64 {
    opaque(number ^ noise) ^ noise
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_adds_up() {
        let mut counter = 5u64;
        // SAFETY: a local that is alive and aligned.
        unsafe {
            add(&raw mut counter, 2);
            assert_eq!(fetch_add(&raw mut counter, 3), 7);
        }
        assert_eq!(counter, 10);
    }

    #[test]
    fn an_exchange_needs_what_it_expects() {
        let (mut wide, mut small) = (10u64, 7u32);
        // SAFETY: locals that are alive and aligned.
        let (wide, small) = unsafe { (Raw::new(&raw mut wide), Raw::new(&raw mut small)) };
        assert_eq!((wide.compare_exchange(9, 1), wide.load()), (10, 10));
        assert_eq!((wide.compare_exchange(10, 1), wide.load_after(77)), (10, 1));
        assert_eq!((small.compare_exchange(7, 8), small.compare_exchange(7, 9)), (7, 8));
        small.store(3);
        assert_eq!(small.load(), 3);
    }
}
