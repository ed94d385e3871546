//! Standard input, whose end ends a command that would run for ever.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns a flag that becomes true when standard input ends; the input itself is not used.
pub fn input_end() -> Arc<AtomicBool> {
    let ended = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&ended);
    std::thread::spawn(move || {
        // An input that cannot be read counts as ended.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        noted.store(true, Ordering::Relaxed);
    });
    ended
}
