//! The `towline` command: parse, call one verb, render.
//!
//! Settings come from flags, the environment and `towline.toml` (`config.rs`); what a command finds out goes to standard
//! output as text or as one JSON object (`output.rs`); errors and progress go to standard error. Exit codes are those of
//! [`ErrorKind::exit_code`], or of the signal that ended it (`signals.rs`).

#[cfg(feature = "agent")]
mod agent;
mod allocator;
mod args;
#[cfg(feature = "agent")]
mod audit;
mod config;
#[cfg(test)]
#[cfg(feature = "agent")]
mod documents;
#[cfg(feature = "agent")]
mod handoff;
mod help;
#[cfg(feature = "agent")]
mod hint;
#[cfg(feature = "agent")]
mod identity;
mod label;
mod log;
mod moves;
mod output;
#[cfg(feature = "agent")]
mod page;
#[cfg(feature = "agent")]
mod policy;
mod progress;
mod recorded;
mod render;
mod show;
mod signals;
#[cfg(feature = "agent")]
mod sites;
#[cfg(feature = "agent")]
mod stage;
#[cfg(feature = "agent")]
mod stage_bench;
mod target;
#[cfg(test)]
#[cfg(feature = "agent")]
mod tests;
#[cfg(feature = "agent")]
mod token;
#[cfg(feature = "agent")]
mod top;
mod trust;
mod undelete;
#[cfg(feature = "agent")]
mod usage;
mod verbs;
#[cfg(feature = "agent")]
mod warm;
mod watch;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind as Parsing};
use clap::{CommandFactory, Parser};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use self::args::{Cli, Verb};
use self::config::{Environment, Flags, Settings};
use self::output::Output;
use self::signals::{Failed, Interruption, interruptible, listen};
use self::verbs::Context;
use crate::error::{Error, ErrorKind, Result};
use crate::progress::Progress;
use crate::storage::without_user;

/// More threads that only await buy nothing: hashing, coding and files have threads of their own.
const WORKERS_MAX: usize = 4;
/// Time that an interrupted command has to release what it holds.
const SHUTDOWN_MAX: Duration = Duration::from_secs(3);

/// Runs the command that the process was started with.
#[must_use]
pub fn run() -> ExitCode {
    ExitCode::from(run_with(std::env::args_os().collect()))
}

/// Runs the command that `args` spell, its own name first, for a process that is there for nothing else: signals, standard
/// output and standard error are the command's. Returns the exit code.
#[must_use]
pub fn run_with(args: Vec<OsString>) -> u8 {
    allocator::set_up();
    let json = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json");
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return not_parsed(error, json),
    };
    let output = Output::new(cli.globals.json, cli.globals.quiet);
    log::start(&cli.globals);
    match execute(cli, &output) {
        Ok(code) => code,
        Err(_) if output.is_broken() => 0,
        Err(Failed { error, code }) => {
            output.error(&error);
            code
        }
    }
}

/// Help and version are answers; the rest is wrong usage.
fn not_parsed(mut error: clap::Error, json: bool) -> u8 {
    if error.kind() == Parsing::UnknownArgument {
        // A tip on how to pass the unknown option as a value.
        error.remove(ContextKind::Suggested);
    }
    hide_user(&mut error);
    let asked = matches!(error.kind(), Parsing::DisplayHelp | Parsing::DisplayVersion);
    if json && !asked {
        let text = error.render().to_string();
        Output::new(true, false).error(&Error::usage(text.trim_start_matches("error: ").trim_end().to_owned()));
    } else if let Err(source) = error.print()
        && asked
    {
        return not_printed(source, json);
    }
    if asked { 0 } else { ErrorKind::Usage.exit_code() }
}

/// Hides what may be a secret in an address that is no value of its argument.
fn hide_user(error: &mut clap::Error) {
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue)
        && value.contains(":/")
    {
        let shown = without_user(value).into_owned();
        error.insert(ContextKind::InvalidValue, ContextValue::String(shown));
    }
}

/// The exit code where help or the version cannot be printed. A reader that has gone wants no more.
fn not_printed(source: io::Error, json: bool) -> u8 {
    if source.kind() == io::ErrorKind::BrokenPipe {
        return 0;
    }
    let error = Error::standard_output(source);
    Output::new(json, false).error(&error);
    error.kind().exit_code()
}

/// Carries out the command in a runtime of its own, which is gone afterwards.
fn execute(cli: Cli, output: &Output) -> Result<u8, Failed> {
    let folder = std::env::current_dir().map_err(|source| {
        Error::not_found("the working directory is gone").help("cd to one that exists").source(source)
    })?;
    let around = Environment { folder: &folder, variable: &|name| std::env::var_os(name) };
    let resolve = if cli.verb.reads_settings() { Settings::resolve } else { Settings::without_file };
    let context = Context {
        settings: resolve(Flags { places: cli.verb.places(), ..cli.globals.flags() }, around)?,
        output: output.clone(),
        progress: Progress::default(),
        // Log lines would tear the line of progress.
        draw: !cli.globals.json && !cli.globals.quiet && cli.globals.verbose == 0,
        #[cfg(feature = "agent")]
        memory: cli.globals.flags().memory,
        stop: CancellationToken::new(),
    };
    let runtime = runtime()?;
    runtime.block_on(async { signals::survive_file_limit() })?;
    let result = match cli.verb {
        verb if verb.handles_signals() => runtime.block_on(context.execute(verb)).map_err(Failed::from),
        verb => {
            signals::end_at_the_second()?;
            let stop =
                matches!(verb, Verb::Save(_) | Verb::Sync(_) | Verb::Doctor { .. }).then(|| context.stop.clone());
            let manner = Interruption { stop, help: verb.help_when_interrupted() };
            runtime.block_on(interruptible(context.execute(verb), manner, output))
        }
    };
    // A thread that is stuck in a system call, such as a write to a pipe that nobody reads, must not keep us.
    runtime.shutdown_timeout(SHUTDOWN_MAX);
    result
}

fn runtime() -> Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Builder::new_multi_thread()
        .worker_threads(cores.min(WORKERS_MAX))
        .max_blocking_threads(2 * cores + 8)
        .thread_name("towline")
        .enable_all()
        .build()
        .map_err(|source| Error::other("threads cannot be started").source(source))
}

/// Error for a command that is not in this build.
#[cfg(not(feature = "agent"))]
fn lacking(words: &[OsString]) -> Error {
    const AGENT: [&str; 11] =
        ["identity", "agent", "warm", "pin", "unpin", "pins", "cache", "handoff", "page", "top", "audit"];
    let name = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
    if AGENT.contains(&&*name) {
        return Error::unsupported(format!("towline {name} needs the feature `agent`, which this build lacks"))
            .help("cargo install towline --features agent");
    }
    Error::usage(format!("unrecognized command `{name}`")).help("`towline help` lists the commands")
}

/// The script that completes `towline` in `shell`.
fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "towline", &mut script);
    script
}
