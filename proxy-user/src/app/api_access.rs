//! Sends requests of commands to the API server: whether it permits what the agent needs (`ballast check`), and for labels.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::api::client::{ConnectError, Options, connect};
use crate::api::connect::is_tls;
use crate::api::fresh::Relister;
use crate::api::lookup;
use crate::cli::args::check::CheckArgs;
use crate::cli::args::list::ApiArgs;
use crate::cli::check::facts::ApiAccess;
use crate::cli::show::AskApi;
use proxy_core::model::ApiServers;
use proxy_core::model::lookup::{Places, PodFacts};
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::problem::chain;

/// An API server that does not answer within this time is away.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns the time for all servers: one after the other is tried.
fn patience(args: &ApiArgs) -> Duration {
    PATIENCE + PATIENCE * args.master.len() as u32
}

/// Returns whether the API server answers, and permits to list what the agent needs.
pub fn api_access(args: &CheckArgs) -> ApiAccess {
    if args.no_api {
        return ApiAccess::NotAsked;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return ApiAccess::Unreachable(format!("cannot start the async runtime: {error}")),
    };
    runtime.block_on(async {
        let patience = patience(&args.api);
        match timeout(patience, ask(args)).await {
            Ok(access) => access,
            Err(_) => ApiAccess::Unreachable(format!("the API server does not answer within {patience:?}")),
        }
    })
}

async fn ask(args: &CheckArgs) -> ApiAccess {
    let client = match client(&args.api).await {
        Ok(client) => client,
        Err(error @ ConnectError::NotFound) => return ApiAccess::NoCredentials(error.to_string()),
        Err(ConnectError::Kubeconfig { path, source }) => {
            let why = format!("cannot use the kubeconfig {}: {}", path.display(), chain(&*source));
            return ApiAccess::BrokenKubeconfig(why);
        }
        Err(ConnectError::Setup(error)) if !error.is_proxy() => {
            return ApiAccess::Certificates(chain(&error));
        }
        Err(error) => return ApiAccess::Unreachable(chain(&error)),
    };
    let version = match client.apiserver_version().await {
        Ok(version) => version.git_version,
        Err(error) => {
            let why = format!("the API server does not answer: {}", chain(&error));
            return if is_tls(&error) { ApiAccess::Certificates(why) } else { ApiAccess::Unreachable(why) };
        }
    };
    let kinds = Relister::new(client).refused().await;
    if kinds.is_empty() { ApiAccess::Well { version } } else { ApiAccess::Refused { version, kinds } }
}

async fn client(args: &ApiArgs) -> Result<Client, ConnectError> {
    let servers = args.master.iter().filter(|url| !url.is_empty()).cloned().collect();
    let options = Options { kubeconfig: args.kubeconfig.clone(), servers };
    let (server_status, _servers) = watch::channel(ApiServers::default());
    Ok(connect(&options, server_status).await?.client)
}

/// What the reading commands ask the API server for.
pub const ASK: AskApi = AskApi { labels: labelled, places, pod };

/// Sends requests to the API server; the error is a message.
fn asked<T, F: Future<Output = Result<T, kube::Error>>>(
    args: &ApiArgs,
    request: impl FnOnce(Client) -> F,
) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the async runtime: {error}"))?;
    runtime.block_on(async {
        let asked = async {
            let client = client(args).await.map_err(|error| chain(&error))?;
            request(client).await.map_err(|error| chain(&error))
        };
        let patience = patience(args);
        timeout(patience, asked)
            .await
            .unwrap_or_else(|_| Err(format!("the API server does not answer within {patience:?}")))
    })
}

/// Returns the Services with these labels, as namespace and name; the error is a message.
fn labelled(args: &ApiArgs, selector: &str) -> Result<BTreeSet<(String, String)>, String> {
    asked(args, |client| async move { Relister::new(client).labelled(selector).await })
}

/// Returns the places of the endpoints of a namespace, or of all.
fn places(args: &ApiArgs, namespace: Option<&str>) -> Result<Places, String> {
    asked(args, |client| lookup::places(client, namespace))
}

/// Returns what the API server knows of a pod.
fn pod(args: &ApiArgs, namespace: &str, name: &str) -> Result<PodFacts, String> {
    let found = asked(args, |client| lookup::pod(client, namespace, name))?;
    found.map_err(|others| {
        let near = did_you_mean(&nearest(name, others.iter().map(String::as_str)));
        format!("there is no pod {namespace}/{name}{near}")
    })
}
