//! Memory that several CPUs read and write at once: every access to it goes through these traits, so that nothing holds a
//! reference to it, and that a model checker can run the same source on memory of its own.
//!
//! # Ordering
//! [`Exchange::compare_exchange`] is a full barrier. Plain loads and stores are `READ_ONCE` and `WRITE_ONCE`: not torn, and
//! not ordered by themselves. Where a reader relies on the order of two loads, the second one is made to depend on the
//! first ([`after`]), which every CPU that Linux runs on respects.

/// A shared integer.
pub trait Shared: Copy {
    /// Its type.
    type Value: Copy + PartialEq;
    /// Reads it once.
    fn load(self) -> Self::Value;
    /// Reads it after whatever `witness` was computed from has been read (acquire).
    fn load_after(self, witness: u64) -> Self::Value;
    /// Writes it once.
    fn store(self, value: Self::Value);
}

/// A shared integer that can be exchanged.
pub trait Exchange: Shared {
    /// Writes `new` where `old` stands, and gives what stood there. A full barrier: a CPU that sees the new value sees all
    /// that was written before it.
    fn compare_exchange(self, old: Self::Value, new: Self::Value) -> Self::Value;
}

/// A shared integer at an address: of a map, or of a test's own memory.
pub struct Raw<T>(*mut T);

impl<T> Clone for Raw<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

impl<T> Raw<T> {
    /// The integer at this address.
    ///
    /// # Safety
    /// The address is aligned, and valid for reads and writes as long as the value is used.
    #[inline(always)]
    pub unsafe fn new(address: *mut T) -> Self {
        Self(address)
    }
}

/// Zero, computed from `witness`: what is added to an address makes the access depend on `witness`. x86 keeps loads in
/// order, and needs none of this.
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
                // SAFETY: its constructor requires a valid address.
                unsafe { self.0.read_volatile() }
            }

            #[inline(always)]
            fn load_after(self, witness: u64) -> $integer {
                // SAFETY: the same address.
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
            // SAFETY: its constructor requires a valid address; the instruction touches nothing else.
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
            // SAFETY: its constructor requires a valid address.
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
            // SAFETY: its constructor requires a valid address; the instruction touches nothing else.
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
            // SAFETY: its constructor requires a valid address.
            let word = unsafe { AtomicU32::from_ptr(self.0) };
            match word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(found) | Err(found) => found,
            }
        }
    }
}

/// Adds to a counter that several CPUs write.
///
/// # Safety
/// `counter` is aligned, and valid for reads and writes.
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

/// The same number, of which the compiler knows nothing any more: it makes branches of sums that compare, and keeps on the
/// stack what could be computed again.
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

/// The same number, of which the verifier knows nothing any more: each value that it can tell apart is a state of its own, with
/// which it walks through all that follows. `noise` is any number that it knows nothing of.
#[inline(always)]
pub fn forget(number: u64, noise: u64) -> u64 {
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
