//! Follows a value that changes.

use tokio::sync::watch;

/// Reports the value now and after each change, until its sender is dropped.
pub async fn follow<T>(mut changes: watch::Receiver<T>, report: impl Fn(&T)) {
    loop {
        report(&changes.borrow_and_update());
        if changes.changed().await.is_err() {
            return;
        }
    }
}
