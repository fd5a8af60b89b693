//! The command line: everything but `serve` and `config` speaks to the daemon through its control
//! socket, and moves data over NBD.
//!
//! Nothing of the daemon is known here. Parts of it that run in this process are behind
//! [`Program`].
#![deny(unsafe_code)]

mod add;
mod answers;
mod args;
mod attach;
mod cells;
mod client;
mod clone;
mod columns;
mod completions;
mod del;
mod diff;
mod duration;
mod encryption;
mod events;
mod extend_request;
mod features;
mod grow;
mod health;
mod holds;
mod import_export;
mod labels;
mod man;
mod map;
mod names;
mod node;
mod output;
mod pmem;
mod pool;
mod pool_tools;
mod program;
mod recover;
mod rename;
mod reset;
mod resize;
mod rollback;
#[cfg(test)]
#[path = "testing/screens.rs"]
mod screens;
mod set;
mod snapshot;
mod space;
mod top;
mod transfer;
mod tune;
mod usage;
mod version;
mod volumes;

use std::process::ExitCode;
use std::time::Duration;

use args::{Arguments, Global, Verb};
use blockd_media::error::Error;
use blockd_media::units;
use clap::FromArgMatches;
use client::Client;
use output::Output;
use serde::Serialize;

pub use program::{
    ConfigReport, HookRun, NodeRemoval, NodeRemoved, Program, Removal, TakenPool, UnreadPool,
};

/// The context of a verb.
#[derive(Debug)]
struct Context {
    global: Global,
    output: Output,
    program: &'static dyn Program,
}

impl Context {
    /// A connection to the daemon.
    async fn client(&self) -> Result<Client, Error> {
        self.patient_client(self.global.timeout).await
    }

    /// The same for a call that takes long: it may take this time, or a longer one that was asked
    /// for.
    async fn patient_client(&self, time: Duration) -> Result<Client, Error> {
        let time = time.max(self.global.timeout);
        let client = Client::connect(self.global.socket.as_deref(), time).await?;
        Ok(if self.output.is_json() { client.silent() } else { client })
    }
}

/// Runs the command line of this process to its end. Errors go to standard error, in one line; with
/// `--json` also to standard output, in parts.
#[must_use]
pub fn main(program: &'static dyn Program) -> ExitCode {
    blockd_api::lookup::restrict();
    completions::answer(args::command);
    let matches = args::command().version(program.version()).get_matches();
    let Arguments { global, verb } = match Arguments::from_arg_matches(&matches) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let output = Output::new(global.json, global.bytes);
    let context = Context { global, output, program };
    match run(&context, verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&context, &error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(context: &Context, verb: Verb) -> Result<(), Error> {
    match verb {
        Verb::Serve(serve) => context.program.serve(serve.config.as_deref(), &serve.listen),
        Verb::Config(config) => configuration(context, &config),
        Verb::Journal(journal) => journal.run(context),
        Verb::Pmem(pmem) => pmem.run(context),
        Verb::Node(node) if node.is_offline() => node.run_offline(context),
        Verb::Completions(completions) => completions.run(context),
        Verb::Man(man) => man.run(context, args::command()),
        verb => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|source| Error::io("starting", source))?;
            let ended = runtime.block_on(async {
                match ask(context, verb).await {
                    Err(error) => Err(names::with_places(context, error).await),
                    done => done,
                }
            });
            // A thread that still reads standard input or keys must not hold the end up.
            runtime.shutdown_background();
            ended
        }
    }
}

fn configuration(context: &Context, config: &args::Config) -> Result<(), Error> {
    let (program, json) = (context.program, context.output.is_json());
    match config {
        args::Config::Check(file) => {
            let report = program.check_config(file.config.as_deref(), json)?;
            report.warnings.iter().for_each(|warning| eprintln!("blockd: warning: {warning}"));
            context.output.last_text(&report.text)?;
            let mut errors = report.errors;
            let Some(last) = errors.pop() else { return Ok(()) };
            errors.iter().for_each(|error| eprintln!("blockd: error: {error}"));
            Err(last)
        }
        args::Config::Show(file) => {
            context.output.text(&program.show_config(file.config.as_deref(), json)?)
        }
    }
}

/// Runs a verb that speaks to the daemon.
async fn ask(context: &Context, verb: Verb) -> Result<(), Error> {
    match verb {
        Verb::Add(add) => add.run(context).await,
        Verb::Del(del) => del.run(context).await,
        Verb::List(list) => list.run(context).await,
        Verb::Show(show) => show.run(context).await,
        Verb::Resize(resize) => resize.run(context).await,
        Verb::Rename(rename) => rename.run(context).await,
        Verb::Set(set) => set.run(context).await,
        Verb::Snapshot(snapshot) => snapshot.run(context).await,
        Verb::Clone(clone) => clone.run(context).await,
        Verb::Rollback(rollback) => rollback.run(context).await,
        Verb::Reset(reset) => reset.run(context).await,
        Verb::Diff(diff) => diff.run(context).await,
        Verb::Space(space) => space.run(context).await,
        Verb::Attach(attach) => attach.run(context).await,
        Verb::Detach(detach) => detach.run(context).await,
        Verb::Recover(recover) => recover.run(context).await,
        Verb::Features(features) => features.run(context).await,
        Verb::Import(import) => import.run(context).await,
        Verb::Export(export) => export.run(context).await,
        Verb::Send(send) => send.run(context).await,
        Verb::Receive(receive) => receive.run(context).await,
        Verb::Move(moving) => moving.run(context).await,
        Verb::Replicate(replicate) => replicate.run(context).await,
        Verb::Pool(pool) => pool.run(context).await,
        Verb::Vg(group) => group.run(context).await,
        Verb::Cell(cell) => cell.run(context).await,
        Verb::Node(node::Node::Lost(lost)) => cells::lose(context, lost.group).await,
        Verb::Node(node::Node::DeclareDead(node::DeclareDead { which, force })) => {
            cells::declare_dead(context, which.host()?, force).await
        }
        Verb::Node(node::Node::Forget(node::Forget { which, force })) => {
            cells::forget(context, which.host()?, force).await
        }
        Verb::Node(node) => node.run(context).await,
        Verb::Health(health) => health.run(context).await,
        Verb::Tune(tune) => tune.run(context).await,
        Verb::Top(top) => top.run(context).await,
        Verb::Events(events) => events.run(context).await,
        Verb::ExtendRequest(request) => request.run(context).await,
        Verb::Version(_) => version::run(context).await,
        // `run` has dealt with these.
        Verb::Serve(_)
        | Verb::Config(_)
        | Verb::Journal(_)
        | Verb::Pmem(_)
        | Verb::Completions(_)
        | Verb::Man(_) => Ok(()),
    }
}

/// An error in the output of `--json`.
#[derive(Serialize)]
struct Failure {
    error: Parts,
}

#[derive(Serialize)]
struct Parts {
    code: u8,
    kind: &'static str,
    field: Option<String>,
    value: Option<String>,
    allowed: Option<String>,
    message: String,
}

impl Failure {
    fn of(error: &Error) -> Self {
        let some = |text: String| (!text.is_empty()).then_some(text);
        let detail = error.detail();
        Self {
            error: Parts {
                code: error.exit_code(),
                kind: error.kind().row().name,
                field: some(detail.field),
                value: some(detail.value),
                allowed: some(detail.allowed),
                message: detail.message,
            },
        }
    }
}

fn report(context: &Context, error: &Error) {
    eprintln!("blockd: error: {error}");
    if context.output.is_json() && !context.output.has_printed() {
        // A second failure of standard output need not be reported.
        let _ = context.output.json(&Failure::of(error));
    }
}

/// An amount from the daemon. Negative ones mean that there is none.
fn amount(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// The size in a command's arguments, as the control API takes it.
fn size_argument(field: &str, text: &str) -> Result<i64, Error> {
    units::parse_size(field, text).map(units::to_wire)
}
