//! Sends requests of commands to the API server: whether it permits what the agent needs (`ballast check`), and for labels.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::cli::check::facts::ApiAccess;
use crate::cli::show::AskApi;
use proxy_cli::args::check::CheckArgs;
use proxy_cli::args::list::ApiArgs;
use proxy_core::model::ApiServers;
use proxy_core::model::lookup::{Places, PodFacts};
use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::problem::chain;
use proxy_watch::api::client::{ConnectError, Options, connect};
use proxy_watch::api::connect::is_tls;
use proxy_watch::api::fresh::Relister;
use proxy_watch::api::lookup;

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
        let (patience, server) = (patience(&args.api), OnceCell::new());
        match timeout(patience, ask(args, &server)).await {
            Ok(access) => access,
            Err(_) => ApiAccess::Unreachable(silent(server.get(), patience)),
        }
    })
}

async fn ask(args: &CheckArgs, server: &OnceCell<String>) -> ApiAccess {
    let client = match client(&args.api, server).await {
        Ok(client) => client,
        Err(error @ ConnectError::NotFound) => return ApiAccess::NoCredentials(error.to_string()),
        Err(ConnectError::Kubeconfig { path, why }) => {
            let why = format!("cannot use the kubeconfig {}: {why}", path.display());
            return ApiAccess::BrokenKubeconfig(why);
        }
        Err(error @ (ConnectError::EmptyAuthority | ConnectError::Header { .. })) => {
            return ApiAccess::BrokenKubeconfig(error.to_string());
        }
        Err(ConnectError::Setup(error)) if !error.is_proxy() => {
            return ApiAccess::Certificates(chain(&error));
        }
        Err(error) => return ApiAccess::Unreachable(chain(&error)),
    };
    let version = match client.apiserver_version().await {
        Ok(version) => version.git_version,
        // Whether the needed objects can be listed is another question.
        Err(kube::Error::Api(status)) if status.code == 403 => "the API server".to_owned(),
        Err(error) => {
            let why = request_error(&error, server.get());
            return match &error {
                kube::Error::Api(status) if status.code == 401 => ApiAccess::BrokenKubeconfig(why),
                error if is_tls(error) => ApiAccess::Certificates(why),
                _ => ApiAccess::Unreachable(why),
            };
        }
    };
    let kinds = Relister::new(client).refused().await;
    if kinds.is_empty() { ApiAccess::Well { version } } else { ApiAccess::Refused { version, kinds } }
}

/// Creates a client, and sets the name of its servers.
async fn client(args: &ApiArgs, server: &OnceCell<String>) -> Result<Client, ConnectError> {
    let servers: Vec<String> = args.master.iter().filter(|url| !url.is_empty()).cloned().collect();
    let given = servers.join(", ");
    let options = Options { kubeconfig: args.kubeconfig.clone(), servers };
    let (server_status, _servers) = watch::channel(ApiServers::default());
    let connection = connect(&options, server_status).await?;
    // The cell is empty: each command creates one client.
    let _ = server.set(if given.is_empty() { connection.url.to_string() } else { given });
    Ok(connection.client)
}

/// Returns the text that no API server has answered in time.
fn silent(server: Option<&String>, patience: Duration) -> String {
    let server = server.map(|name| format!(" {}", name.trim_end_matches('/'))).unwrap_or_default();
    format!("the API server{server} does not answer within {patience:?}")
}

/// Returns the text of a failed request.
fn request_error(error: &kube::Error, server: Option<&String>) -> String {
    let server = server.map(|name| name.trim_end_matches('/')).unwrap_or_default();
    match error {
        kube::Error::Api(status) if status.code == 401 => format!(
            "the API server {server} does not accept the credentials (401): check whether the token or the client certificate \
             of the kubeconfig has expired"
        ),
        kube::Error::Api(status) => {
            // A proxy may answer with a whole page.
            let first = status.message.lines().next().unwrap_or_default();
            format!("the API server {server} answers {}: {first}", status.code)
        }
        kube::Error::Service(_) => chain(error),
        error => format!("{server} does not answer as an API server ({})", chain(error)),
    }
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
        let (patience, server) = (patience(args), OnceCell::new());
        let asked = async {
            let client = client(args, &server).await.map_err(|error| chain(&error))?;
            request(client).await.map_err(|error| {
                format!("{}; check --kubeconfig and --master", request_error(&error, server.get()))
            })
        };
        timeout(patience, asked).await.unwrap_or_else(|_| Err(silent(server.get(), patience)))
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
        format!("there is none of this name{near}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    #[test]
    fn failed_request_names_its_server() {
        let server = "https://192.0.2.1:6443/".to_owned();
        let of = |message: &str, code| {
            let status = Status::failure(message, "X").with_code(code);
            request_error(&kube::Error::Api(status.boxed()), Some(&server))
        };
        let expired = of("Unauthorized", 401);
        assert!(expired.starts_with("the API server https://192.0.2.1:6443 does not accept"), "{expired}");
        assert!(expired.contains("expired"), "{expired}");
        assert_eq!(of("<html>\n<body>", 503), "the API server https://192.0.2.1:6443 answers 503: <html>");
    }
}
