//! Follows the files of certificates and keys, which are replaced before they expire.
//!
//! A client reads them once. When their content changes, all servers get new clients, and answers in progress end, so
//! that no connection uses the old credentials. kube-rs itself follows token files, and the CA of a service account.

use std::time::Duration;

use tokio::time::sleep;

use super::client::{ConnectError, Connection, load};
use super::files::Files;
use proxy_core::model::problem::chain;

/// How often the files are read.
const PERIOD: Duration = Duration::from_secs(10);

/// Follows the files of a connection for ever. Passes to `report` why new credentials cannot be used, and `None` when
/// that is over.
pub async fn follow(mut connection: Connection, report: impl Fn(Option<String>) + Send) {
    loop {
        sleep(PERIOD).await;
        match renew_if_changed(&mut connection).await {
            None => {}
            Some(Ok(())) => {
                report(None);
                tracing::info!("the credentials have changed; connecting to the API servers again");
            }
            Some(Err(error)) => {
                let error = chain(&error);
                tracing::debug!(error, "cannot use the changed credentials; retrying");
                report(Some(format!(
                    "the changed kubeconfig or its certificates cannot be used, the previous ones stay in use: {error}"
                )));
            }
        }
    }
}

/// Connects with new credentials if the files have changed; `None`: they have not. A file that is replaced while it is
/// read differs at the next look.
async fn renew_if_changed(connection: &mut Connection) -> Option<Result<(), ConnectError>> {
    let now = Files::of(connection.options.kubeconfig.as_deref());
    if now == connection.files {
        return None;
    }
    let renewed = load(&connection.options).await;
    let renewed = renewed.and_then(|config| Ok(connection.servers.renew(config)?));
    if renewed.is_ok() {
        connection.files = now;
    }
    Some(renewed)
}

#[cfg(test)]
mod tests;
