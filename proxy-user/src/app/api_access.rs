//! Asks the API server for `ballast check`.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use crate::api::client::{ConnectError, Options, connect};
use crate::api::fresh::Fresh;
use crate::cli::args::check::CheckArgs;
use crate::cli::check::facts::ApiAccess;
use crate::model::ApiServers;

/// An API server that does not answer within this time is away.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the API server answers, and lists what the agent needs.
pub fn api_access(args: &CheckArgs) -> ApiAccess {
    if args.no_api {
        return ApiAccess::NotAsked;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return ApiAccess::Unreachable(format!("cannot start the async runtime: {error}")),
    };
    runtime.block_on(async {
        match timeout(PATIENCE, ask(args)).await {
            Ok(access) => access,
            Err(_) => ApiAccess::Unreachable(format!("the API server does not answer within {PATIENCE:?}")),
        }
    })
}

async fn ask(args: &CheckArgs) -> ApiAccess {
    let servers = args.master.iter().filter(|url| !url.is_empty()).cloned().collect();
    let options = Options { kubeconfig: args.kubeconfig.clone(), servers };
    let (told, _servers) = watch::channel(ApiServers::default());
    let client = match connect(&options, told).await {
        Ok(connection) => connection.client,
        Err(error @ ConnectError::NotFound { .. }) => return ApiAccess::NoCredentials(error.to_string()),
        Err(error) => return ApiAccess::Unreachable(chain(&error)),
    };
    let version = match client.apiserver_version().await {
        Ok(version) => version.git_version,
        Err(error) => {
            return ApiAccess::Unreachable(format!("the API server does not answer: {}", chain(&error)));
        }
    };
    let kinds = Fresh::new(client).refused().await;
    if kinds.is_empty() { ApiAccess::Well { version } } else { ApiAccess::Refused { version, kinds } }
}

/// An error and what it comes from, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_are_told_once() {
        assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
        assert_eq!(chain(&Outer(std::io::Error::other("outer"))), "outer");
    }
}
