//! Follows the files of certificates, keys and tokens, which are replaced before they expire.
//!
//! A client reads them once. When their content changes, all servers get new clients, and answers in progress end, so
//! that no connection uses the old credentials. kube-rs itself follows the token of a service account by the wall
//! clock; if the server does not accept the credentials, everything is read again, as the clock may have been set back.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::client::{ConnectError, Connection, load};
use super::files::Files;
use proxy_core::model::problem::chain;

/// How often the files are read.
const PERIOD: Duration = Duration::from_secs(10);
/// How often the credentials are read again while the server does not accept them.
const REFUSED_PERIOD: Duration = Duration::from_mins(1);

/// Follows the files of a connection for ever. Passes to `report` why new credentials cannot be used, and `None` when
/// that is over.
pub async fn follow(mut connection: Connection, report: impl Fn(Option<String>) + Send) {
    let mut refused: Option<Instant> = None;
    loop {
        sleep(PERIOD).await;
        let is_due = refused.is_none_or(|at| at.elapsed() >= REFUSED_PERIOD);
        let is_refused = connection.servers.is_unauthorized() && is_due;
        if is_refused {
            refused = Some(Instant::now());
        }
        match renew_if_changed(&mut connection, is_refused).await {
            None => {}
            Some(Ok(())) => {
                report(None);
                tracing::info!(is_refused, "the credentials were read again; connecting to the API servers");
            }
            // Why the server refuses is reported by its answer.
            Some(Err(error)) if is_refused => {
                tracing::debug!(
                    error = chain(&error),
                    "cannot read the credentials again, which the API server refuses"
                );
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

/// Connects with new credentials if the files have changed, or if the server refuses the known ones; else `None`. A file that is replaced while it is
/// read differs at the next look.
async fn renew_if_changed(connection: &mut Connection, is_refused: bool) -> Option<Result<(), ConnectError>> {
    let now = Files::of(connection.options.kubeconfig.as_deref());
    if now == connection.files && !is_refused {
        return None;
    }
    let renewed = load(&connection.options).await;
    let renewed = renewed.and_then(|config| {
        let url = config.cluster_url.clone();
        if connection.options.servers.is_empty() && url != connection.url {
            return Err(ConnectError::OtherServer { url });
        }
        Ok(connection.servers.renew(config)?)
    });
    if renewed.is_ok() {
        connection.files = now;
    }
    Some(renewed)
}

#[cfg(test)]
mod tests;
