//! `ballast programmed`: the versions of Services that the agent has programmed, as the agent reports them.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;

use serde::Deserialize;

use super::show::{ServiceProblems, ShowError, agent_address, ask, parse};
use proxy_cli::args::programmed::ProgrammedArgs;
use proxy_cli::output::{List, PROGRAMMED, Row, write_list};
use proxy_cli::programmed::ProgrammedJson;
use proxy_cli::selector::{AskLabels, ServiceFilter, ServiceSelector, nearest_services};
use proxy_cli::value::Listen;

/// The answer of the agent for all Services.
#[derive(Debug, Deserialize)]
struct All {
    node: String,
    synced: bool,
    services: Vec<ProgrammedJson>,
    /// The agent's answer if a named Service is not programmed.
    #[serde(skip)]
    refusal: Option<String>,
}

/// The answer for a Service that is not programmed.
#[derive(Deserialize)]
struct Refusal {
    error: String,
}

/// `ballast programmed`.
pub fn run(args: &ProgrammedArgs, labels: AskLabels, out: &mut impl Write) -> Result<(), ShowError> {
    let selector = ServiceSelector::parse(&args.selector, labels)?;
    let listen = args.agent.metrics_bind_address;
    check(&read(agent_address(listen)?, &selector)?, &selector)?;
    write_list(&args.list, out, || Ok(list(&read(agent_address(listen)?, &selector)?, &selector)))
}

/// Reads the named Services, or all if not all names have a namespace.
fn read(address: SocketAddr, selector: &ServiceSelector) -> Result<All, ShowError> {
    let paths: Option<BTreeSet<String>> = selector.services.iter().map(ServiceFilter::path).collect();
    match paths {
        Some(paths) if !paths.is_empty() => read_named(address, &paths),
        _ => {
            let (status, body) = ask(address, "/programmed")?;
            Ok(parse(address, "/programmed", status, &body)?)
        }
    }
}

fn read_named(address: SocketAddr, paths: &BTreeSet<String>) -> Result<All, ShowError> {
    let mut all = All { node: String::new(), synced: true, services: Vec::new(), refusal: None };
    for path in paths {
        let path = format!("/programmed/{path}");
        let (status, body) = ask(address, &path)?;
        match serde_json::from_slice::<Refusal>(&body) {
            Ok(Refusal { error }) if status != 200 => all.refusal = all.refusal.or(Some(error)),
            _ => all.services.push(parse(address, &path, status, &body)?),
        }
    }
    Ok(all)
}

/// Returns the problems of the selected Services, or of more; none if the agent does not answer.
pub(in crate::cli) fn problems(
    listen: Option<Listen>,
    selector: &ServiceSelector,
) -> Result<ServiceProblems, ShowError> {
    let all = match agent_address(listen) {
        Ok(address) => read(address, selector)?,
        Err(_) => return Ok(ServiceProblems::default()),
    };
    Ok(all.services.into_iter().map(|one| ((one.namespace, one.name), one.problems)).collect())
}

/// Fails before the first sync, if a named Service or namespace is not programmed, or if only a port is named.
fn check(all: &All, selector: &ServiceSelector) -> Result<(), ShowError> {
    if let Some(filter) = selector.services.iter().find(|filter| filter.has_port()) {
        return Err(ShowError::NotProgrammed(format!(
            "{filter}: a version belongs to the whole Service; give its name without :PORT"
        )));
    }
    if let Some(refusal) = &all.refusal {
        return Err(ShowError::NotProgrammed(refusal.clone()));
    }
    if !all.synced {
        return Err(ShowError::NotProgrammed(format!(
            "the first sync of {} is not complete; see `ballast status`",
            all.node
        )));
    }
    let known: BTreeSet<(&str, &str)> =
        all.services.iter().map(|one| (&*one.namespace, &*one.name)).collect();
    let is_there =
        |filter: &ServiceFilter| known.iter().any(|(namespace, name)| filter.is_of(namespace, name));
    let Some(filter) = selector.services.iter().find(|filter| !is_there(filter)) else {
        return Ok(selector.check_namespace(known.iter().map(|(namespace, _)| *namespace))?);
    };
    let node = &all.node;
    let near = nearest_services(filter, &known);
    Err(ShowError::NotProgrammed(format!(
        "Service {filter} is not programmed on {node}; Ballast does not program headless Services and Services of another proxy{near}"
    )))
}

/// Returns whether the version is programmed, in words.
fn current(one: &ProgrammedJson) -> &'static str {
    match one {
        ProgrammedJson { current: false, .. } => "no",
        ProgrammedJson { frontends: Some(0), .. } => "nothing",
        ProgrammedJson { problems, .. } if problems.is_empty() => "yes",
        _ => "in part",
    }
}

fn list(all: &All, selector: &ServiceSelector) -> List<ProgrammedJson> {
    let mut list = List::new("services", PROGRAMMED, "No Services are programmed.");
    for one in all.services.iter().filter(|one| selector.is_of(&one.namespace, &one.name)) {
        let name = format!("{}/{}", one.namespace, one.name);
        let cells = vec![
            name.clone(),
            one.resource_version.clone().unwrap_or_else(|| "-".to_owned()),
            current(one).to_owned(),
            one.endpoint_slices.len().to_string(),
            one.programmed_since.clone(),
            one.problems.len().to_string(),
            if one.problems.is_empty() { "none".to_owned() } else { one.problems.join("; ") },
        ];
        list.push(Row { group: "services", key: name.clone(), name, cells, value: one.clone() });
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_cli::args::list::Output;

    fn all() -> All {
        let one = |name: &str, frontends: usize, problems: &[&str]| {
            serde_json::json!({
                "namespace": "default", "name": name, "uid": null, "resourceVersion": "7", "generation": null,
                "endpointSlices": [{"name": "a", "uid": null, "resourceVersion": null, "generation": null}],
                "programmedSince": "2026-01-01T00:00:00Z", "current": true, "frontends": frontends,
                "problems": problems,
            })
        };
        let services = [one("web", 2, &[]), one("db", 1, &["no room"]), one("mail", 0, &["taken"])];
        serde_json::from_value(serde_json::json!({"node": "a", "synced": true, "services": services}))
            .unwrap()
    }

    #[test]
    fn a_programmed_service_is_a_row_with_its_version() {
        let text = list(&all(), &ServiceSelector::default()).render(Output::Text, false).unwrap();
        assert_eq!(
            text,
            "default/web   7  yes      1  2026-01-01T00:00:00Z  0\n\
             default/db    7  in part  1  2026-01-01T00:00:00Z  1\n\
             default/mail  7  nothing  1  2026-01-01T00:00:00Z  1\n"
        );
    }

    #[test]
    fn unknown_service_or_namespace_is_refused_with_nearest_names() {
        let named =
            |text: &str| ServiceSelector { services: vec![text.parse().unwrap()], ..Default::default() };
        check(&all(), &named("svc/web")).unwrap();
        let error = check(&all(), &named("wbe")).unwrap_err().to_string();
        assert!(error.contains("did you mean default/web?"), "{error}");
        let error = check(&all(), &named("web:nope")).unwrap_err().to_string();
        assert!(error.contains("without :PORT"), "{error}");
        let namespace = ServiceSelector { namespace: Some("defualt".to_owned()), ..Default::default() };
        let error = check(&all(), &namespace).unwrap_err().to_string();
        assert!(error.contains("did you mean default?"), "{error}");
        let error = check(&All { synced: false, ..all() }, &named("wbe")).unwrap_err().to_string();
        assert!(error.contains("first sync"), "{error}");
        let nothing = All { synced: false, services: Vec::new(), ..all() };
        let error = check(&nothing, &ServiceSelector::default()).unwrap_err().to_string();
        assert!(error.contains("first sync of a is not complete"), "{error}");
    }

    #[test]
    fn only_named_services_are_read() {
        use std::io::Read as _;
        use std::net::TcpListener;
        let selector = |names: &[&str]| ServiceSelector {
            services: names.iter().map(|name| name.parse().unwrap()).collect(),
            ..Default::default()
        };
        let asked = |selector: &ServiceSelector, answers: Vec<String>| {
            let agent = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = agent.local_addr().unwrap();
            let served = std::thread::spawn(move || {
                let one = |answer: String| {
                    let (mut stream, _) = agent.accept().unwrap();
                    let mut request = [0; 512];
                    let length = stream.read(&mut request).unwrap();
                    stream.write_all(answer.as_bytes()).unwrap();
                    let request = String::from_utf8_lossy(&request[..length]).into_owned();
                    request.split(' ').nth(1).unwrap().to_owned()
                };
                answers.into_iter().map(one).collect::<Vec<_>>()
            });
            let all = read(address, selector);
            (served.join().unwrap(), all)
        };
        let found =
            |one: &ProgrammedJson| format!("HTTP/1.1 200 OK\r\n\r\n{}", serde_json::to_string(one).unwrap());
        let missing = "HTTP/1.1 404 Not Found\r\n\r\n{\"error\": \"there is none\"}".to_owned();
        let named = selector(&["web", "a%/b?"]);
        let web = all().services[0].clone();
        let (paths, all) = asked(&named, vec![missing, found(&web)]);
        let all = all.unwrap();
        assert_eq!(paths, ["/programmed/a%25/b%3F", "/programmed/default/web"]);
        assert_eq!(
            (all.services.len(), check(&all, &named).unwrap_err().to_string()),
            (1, "there is none".into())
        );
        let (paths, all) = asked(&selector(&[]), vec!["HTTP/1.1 200 OK\r\n\r\n{\"node\":".to_owned()]);
        let error = all.unwrap_err().to_string();
        assert!(paths == ["/programmed"] && error.contains("cannot parse the answer"), "{paths:?} {error}");
    }
}
