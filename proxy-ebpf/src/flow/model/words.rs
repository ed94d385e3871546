//! Shared words on loom's atomics; [`super::memory`] describes their memory order.

use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

use crate::shared::{Exchange, Shared};

macro_rules! words {
    ($($name:ident $atomic:ident $integer:ty;)+) => {$(
        /// A word of the model.
        #[derive(Clone, Copy)]
        pub struct $name(pub *const $atomic);

        impl $name {
            fn word(&self) -> &$atomic {
                // SAFETY: the table lives until all threads of the model are joined.
                unsafe { &*self.0 }
            }
        }

        impl Shared for $name {
            type Value = $integer;

            fn load(self) -> $integer {
                self.word().load(Relaxed)
            }

            fn load_after(self, _witness: u64) -> $integer {
                fence(Acquire);
                self.word().load(Relaxed)
            }

            fn store(self, value: $integer) {
                self.word().store(value, Relaxed);
            }
        }

        impl Exchange for $name {
            fn compare_exchange(self, old: $integer, new: $integer) -> $integer {
                match self.word().compare_exchange(old, new, AcqRel, Relaxed) {
                    Ok(found) => {
                        fence(SeqCst);
                        found
                    }
                    Err(found) => found,
                }
            }
        }
    )+};
}

words! {
    Word16 AtomicU16 u16;
    Word32 AtomicU32 u32;
    Word64 AtomicU64 u64;
}
