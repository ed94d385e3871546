//! Checks commands in documents: clap has to accept each call of our programs. A command in a shell block is complete; a
//! command in a sentence may be only the beginning of one. Also checks that `kubectl run` starts the command that it names.

use std::ops::Range;

use clap::Command;
use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};

use super::source::{Finding, SourceFile};

/// Checks the calls of these programs, given by their names as users type them (`cargo xtask`) and their parsers.
pub(super) fn check(files: &[SourceFile], programs: &[(&str, Command)]) -> Vec<Finding> {
    let is_page = |file: &&SourceFile| file.path.extension().is_some_and(|ext| ext == "md");
    let mut findings = Vec::new();
    for file in files.iter().filter(is_page) {
        for (lines, is_whole) in [(lines(&file.text), true), (in_sentences(&file.text), false)] {
            for (line, call, program) in calls(&lines, programs) {
                if let Some(fault) = fault(program, &call, is_whole) {
                    let what = format!("`{}`: {fault}", call.join(" "));
                    findings.push(Finding { file: file.path.clone(), line, what });
                }
            }
            for (line, call) in without_command(&lines) {
                let what =
                    format!("`{call}`: without --command, the image's entry point gets the words behind --");
                findings.push(Finding { file: file.path.clone(), line, what });
            }
        }
    }
    findings
}

/// Returns each `kubectl run` whose words behind `--` are to be a command but become arguments, with line numbers.
fn without_command(lines: &[(usize, String)]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, text) in lines {
        for words in commands(text) {
            let words = without_prefix(&words);
            let mut parts = words.split(|word| word == "--");
            let flags = parts.next().unwrap_or_default();
            if is_call(flags, "kubectl run")
                && parts.next().is_some()
                && !flags.iter().any(|flag| flag == "--command")
            {
                found.push((*line, words.join(" ")));
            }
        }
    }
    found
}

/// Returns each call of a program in some lines: the line number, the words from the program's name on, and the parser.
fn calls<'a>(
    lines: &[(usize, String)],
    programs: &'a [(&str, Command)],
) -> Vec<(usize, Vec<String>, &'a Command)> {
    let mut found = Vec::new();
    for (line, text) in lines {
        for words in commands(text) {
            // `kubectl exec POD -- ballast status` calls two programs.
            let behind = words.split(|word| word == "--").skip(1);
            for words in [&words[..]].into_iter().chain(behind).map(without_prefix) {
                if let Some((name, program)) = programs.iter().find(|(name, _)| is_call(words, name)) {
                    let rest = words.iter().skip(name.split(' ').count()).cloned();
                    found.push((*line, [(*name).to_owned()].into_iter().chain(rest).collect(), program));
                }
            }
        }
    }
    found
}

/// Whether a command calls the program, with or without a path.
fn is_call(words: &[String], program: &str) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    let mut names = program.split(' ');
    first.rsplit('/').next() == names.next()
        && rest.iter().map(String::as_str).take(names.clone().count()).eq(names)
}

/// Returns what is wrong with a call, or with the beginning of a call.
fn fault(program: &Command, call: &[String], is_whole: bool) -> Option<String> {
    let mut result = program.clone().try_get_matches_from(call);
    if result.as_ref().is_err_and(is_about_placeholder) {
        result = any_values(program.clone()).try_get_matches_from(call);
    }
    let error = result.err()?;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
        ErrorKind::InvalidSubcommand if is_about_placeholder(&error) => None,
        _ if !is_whole && lacks_something(&error) => None,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Some("a command is missing".to_owned()),
        _ => {
            let text = error.to_string();
            Some(text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned())
        }
    }
}

/// Whether the call could become valid with more words.
fn lacks_something(error: &Error) -> bool {
    let is_value_missing = || {
        let value = error.get(ContextKind::InvalidValue);
        matches!(value, Some(ContextValue::String(value)) if value.is_empty())
    };
    match error.kind() {
        ErrorKind::MissingSubcommand
        | ErrorKind::MissingRequiredArgument
        | ErrorKind::TooFewValues
        | ErrorKind::WrongNumberOfValues
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        ErrorKind::InvalidValue => is_value_missing(),
        _ => false,
    }
}

/// Whether the error is about a placeholder for a value or command, like ADDRESS:PORT.
fn is_about_placeholder(error: &Error) -> bool {
    let is_name = |part: &str| part.len() > 1 && part.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let given = error.get(ContextKind::InvalidValue).or_else(|| error.get(ContextKind::InvalidSubcommand));
    let Some(ContextValue::String(value)) = given else { return false };
    value.split(|c: char| !c.is_alphanumeric() && c != '_').any(is_name)
}

/// Returns a parser with the same commands and flags, which accepts any values.
fn any_values(program: Command) -> Command {
    program
        .mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            if takes_values { arg.value_parser(ValueParser::os_string()) } else { arg }
        })
        .mut_subcommands(any_values)
}

/// Returns the code within sentences and tables, with line numbers from 1. Code with alternatives (`json|yaml`, `[-o FORM]`,
/// `...`) is no command.
fn in_sentences(page: &str) -> Vec<(usize, String)> {
    let is_command = |text: &str| !text.contains(['|', '[', '{', '<', '…']) && !text.contains("...");
    let code = Parser::new(page).into_offset_iter().filter_map(|(event, at)| match event {
        Event::Code(text) if is_command(&text) => {
            Some((page[..at.start].matches('\n').count() + 1, text.to_string()))
        }
        _ => None,
    });
    code.collect()
}

/// Returns the lines of a page's shell blocks, with line numbers from 1: all lines of `sh`, and the lines of `console` that
/// have a prompt. A line that ends with `\` is joined with the next one.
fn lines(page: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut prompt = None;
    let mut goes_on = false;
    let line = |at: &Range<usize>| page[..at.start].matches('\n').count() + 1;
    for (event, at) in Parser::new(page).into_offset_iter() {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                prompt = match &*language {
                    "sh" => Some(""),
                    "console" => Some("$ "),
                    _ => None,
                };
                goes_on = false;
            }
            Event::End(TagEnd::CodeBlock) => prompt = None,
            Event::Text(text) => {
                let Some(prompt) = prompt else { continue };
                for (number, text) in text.lines().enumerate() {
                    let part = text.trim_end_matches('\\');
                    match (goes_on, found.last_mut(), part.strip_prefix(prompt)) {
                        (true, Some((_, before)), _) => before.push_str(part),
                        (_, _, Some(part)) => found.push((line(&at) + number, part.to_owned())),
                        _ => continue,
                    }
                    goes_on = text.ends_with('\\');
                }
            }
            _ => {}
        }
    }
    found
}

/// Returns the commands of a line of shell, each as a list of words, without comments and redirections.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut is_file = false;
    let mut chars = line.chars().peekable();
    loop {
        let next = chars.next();
        match next {
            Some(quote @ ('\'' | '"')) => {
                word.get_or_insert_default().extend(chars.by_ref().take_while(|&c| c != quote));
                continue;
            }
            // A `#` within a word does not start a comment.
            Some(c) if !c.is_whitespace() && !"|&;()<>".contains(c) && (c != '#' || word.is_some()) => {
                word.get_or_insert_default().push(c);
                continue;
            }
            _ => {}
        }
        // Neither `2` nor `file` in `2>file` is a word of the command.
        let is_number = word.as_ref().is_some_and(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
        let is_redirection = matches!(next, Some('<' | '>'));
        if let Some(word) = word.take()
            && !std::mem::take(&mut is_file)
            && !(is_redirection && is_number)
            && let Some(command) = commands.last_mut()
        {
            command.push(word);
        }
        match next {
            Some('<' | '>') => {
                is_file = true;
                while chars.next_if(|&c| c == '>' || c == '&').is_some() {}
            }
            Some('|' | '&' | ';' | '(' | ')') => {
                is_file = false;
                commands.push(Vec::new());
            }
            Some('#') | None => break,
            Some(_) => {}
        }
    }
    commands
}

/// Returns a command without `sudo` and variables before the program.
fn without_prefix(words: &[String]) -> &[String] {
    let is_prefix = |word: &String| {
        let variable = word.split_once('=').map(|(name, _)| name);
        let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        word == "sudo" || variable.is_some_and(is_name)
    };
    let skipped = words.iter().take_while(|word| is_prefix(word)).count();
    words.get(skipped..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use clap::{Arg, CommandFactory as _};
    use proxy_cli::args::kubectl::KubectlArgs;
    use proxy_user::cli::Args;

    use super::*;
    use crate::lint::source;

    fn program() -> Command {
        let client = Arg::new("client").long("client").value_parser(clap::value_parser!(std::net::IpAddr));
        let list = Command::new("list").arg(client);
        Command::new("ballast").subcommand_required(true).subcommand(list)
    }

    /// Returns the line and the text of each finding.
    fn found(page: &str) -> Vec<(usize, String)> {
        let file = SourceFile { path: "docs/a.md".into(), text: page.into() };
        let programs = [("ballast", program()), ("kubectl ballast", program())];
        check(&[file], &programs).into_iter().map(|finding| (finding.line, finding.what)).collect()
    }

    #[test]
    fn commands_that_exist_are_fine() {
        let page = "```sh\nsudo ballast list --client 192.0.2.1 # --nonsense\nA=b x/ballast list --client=CLIENT 2>&1 | grep x\n\
                    kubectl exec POD -- ballast list > nonsense\nkubectl ballast list; helm install ballast nonsense\n\
                    source <(ballast list)\nballast list \\\n  --client ::1\n```\n\
                    ```console\n$ ballast list\nballast nonsense\n```\n```text\nballast nonsense\n```\n";
        assert_eq!(found(page), []);
    }

    #[test]
    fn a_command_a_flag_and_a_value_that_do_not_exist_are_found() {
        for (command, reason) in [
            ("ballast lists", "unrecognized subcommand 'lists'"),
            ("ballast list --cleint ::1", "unexpected argument '--cleint' found"),
            ("ballast list --client CLIENT --more", "unexpected argument '--more' found"),
            ("ballast list --client elsewhere", "invalid value 'elsewhere'"),
            ("kubectl exec POD -- ballast list -x", "unexpected argument '-x' found"),
            ("true && kubectl ballast lists", "unrecognized subcommand 'lists'"),
            ("ballast list \\\n  --more", "unexpected argument '--more' found"),
            ("ballast", "requires a subcommand"),
        ] {
            for block in [
                format!("# A\n\n```sh\n{command}\n```\n"),
                format!("* in a list\n  ```console\n  $ {}\n  ```\n", command.replace('\n', "\n  ")),
            ] {
                let all = found(&block);
                assert_eq!(all.len(), 1, "{command}: {all:?}");
                assert!(all[0].1.contains(reason), "{command}: {all:?}");
                assert_eq!(all[0].0, if block.starts_with('#') { 4 } else { 3 }, "{block}");
            }
        }
    }

    #[test]
    fn a_command_in_a_sentence_may_be_begun_but_not_wrong() {
        let page = "Run `ballast list --client`, `ballast`, `ballast COMMAND --help`, `ballast list -o json|yaml` or `sudo ballast list --client CLIENT`.\n";
        assert_eq!(found(page), []);
        for (code, reason) in [("lists", "unrecognized subcommand"), ("list --cleint", "unexpected argument")]
        {
            let all = found(&format!("# A\n\nRun\n`ballast {code}`.\n"));
            assert!(all.len() == 1 && all[0].0 == 4 && all[0].1.contains(reason), "{code}: {all:?}");
        }
    }

    #[test]
    fn a_command_for_a_new_pod_without_the_flag_is_found() {
        let all = found(
            "```sh\nkubectl run a --image=b --command -- curl c\nkubectl run a --image=b\nkubectl exec a -- curl c\nkubectl run a --image=b -- curl c\n```\n",
        );
        assert!(all.len() == 1 && all[0].0 == 5 && all[0].1.contains("--command"), "{all:?}");
        assert_eq!(found("Run `kubectl run a --image=b -- curl c`.\n").len(), 1);
    }

    #[test]
    fn ballast_takes_what_the_documents_call() {
        let files = source::files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        let programs = [("ballast", Args::command()), ("kubectl ballast", KubectlArgs::command())];
        assert_eq!(check(&files, &programs), []);
        let pages = files.iter().filter(|file| file.path.extension().is_some_and(|ext| ext == "md"));
        let count = pages.map(|file| calls(&lines(&file.text), &programs).len()).sum::<usize>();
        assert!(count > 40, "only {count} calls were found");
    }
    /// Flags of other programs that the documents name.
    const FLAGS_OF_OTHERS: [&str; 22] = [
        "--cgroupns",
        "--cgroups-per-qos",
        "--ctorigdstport",
        "--disable-kube-proxy",
        "--dst-type",
        "--enable-feature",
        "--enable-ipv6",
        "--end-udp-sockets",
        "--extra-config",
        "--ip-masq",
        "--kube-subnet-mgr",
        "--network",
        "--privileged",
        "--random-fully",
        "--reset-then-reuse-values",
        "--reuse-values",
        "--run-service-proxy",
        "--server",
        "--set",
        "--skip",
        "--skip-phases",
        "--to-ports",
    ];
    /// Variables that no flag has.
    const VARIABLES_WITHOUT_FLAG: [&str; 2] = ["BALLAST_LOG", "BALLAST_COMPARE_SEED"];

    /// Adds the flags and variables of a command and of those below it.
    fn collect(command: &Command, names: &mut BTreeSet<String>) {
        for arg in command.get_arguments() {
            let flags = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
            names.extend(flags.map(|name| format!("--{name}")));
            names.extend(arg.get_env().map(|name| name.to_string_lossy().into_owned()));
        }
        command.get_subcommands().for_each(|below| collect(below, names));
    }

    /// Returns the names that follow each `before` in a text, from the beginning of `before` that belongs to the name.
    fn named<'a>(text: &'a str, before: &str, is_of_name: fn(char) -> bool) -> Vec<&'a str> {
        let names = text.match_indices(before).map(|(at, _)| {
            let rest = text[at..].trim_start_matches('`');
            rest.split(|c| !is_of_name(c)).next().unwrap_or_default()
        });
        names.filter(|name| !name.ends_with(['-', '_'])).collect()
    }

    #[test]
    fn flags_and_variables_of_the_documents_exist() {
        let files = source::files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
        let mut known: BTreeSet<String> =
            FLAGS_OF_OTHERS.into_iter().chain(VARIABLES_WITHOUT_FLAG).map(str::to_owned).collect();
        for mut program in [Args::command(), KubectlArgs::command(), crate::Cli::command()] {
            // Adds `--version`.
            program.build();
            collect(&program, &mut known);
        }
        let mut found = Vec::new();
        for file in files.iter().filter(|file| file.path.extension().is_some_and(|ext| ext == "md")) {
            let flags = named(&file.text, "`--", |c| c.is_ascii_alphanumeric() || c == '-');
            let variables = named(&file.text, "BALLAST_", |c| c.is_ascii_uppercase() || c == '_');
            let all = flags.into_iter().chain(variables);
            found.extend(all.filter(|name| !known.contains(*name)).map(|name| (&file.path, name)));
        }
        assert_eq!(found, [], "no flag or variable");
    }

    #[test]
    fn each_flag_of_the_agent_is_documented() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let pages =
            ["flags.md", "compatibility.md"].map(|page| fs_err::read_to_string(docs.join(page)).unwrap());
        let listed: BTreeSet<_> = pages
            .iter()
            .flat_map(|page| named(page, "`--", |c| c.is_ascii_alphanumeric() || c == '-'))
            .collect();
        let run = Args::command().find_subcommand("run").unwrap().clone();
        let flags = run.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long());
        let missing: Vec<_> = flags.filter(|flag| !listed.contains(format!("--{flag}").as_str())).collect();
        assert_eq!(missing, [""; 0], "no row in docs/flags.md");
    }
}
