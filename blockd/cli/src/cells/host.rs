//! `blockd node declare-dead` and `blockd node forget` for a host of a volume group.

use blockd_api::v1;
use blockd_media::error::Error;
use serde::Serialize;
use tonic::Streaming;

use super::super::Context;
use crate::client::Client;

/// A host of a volume group, GROUP/NUMBER.
#[derive(Clone, PartialEq, Eq, Debug)]
struct HostName {
    group: String,
    number: u32,
}

/// The output of `node declare-dead --json` and `node forget --json` for a host of a volume group.
#[derive(Debug, Default, Serialize)]
struct LeftShape {
    changed: bool,
    node: String,
    hooks: Vec<v1::HookRun>,
    cells: Vec<v1::HostCell>,
}

impl HostName {
    fn parse(text: &str) -> Result<Self, Error> {
        let (group, number) = text.split_once('/').unwrap_or_default();
        let number = number.parse().ok().filter(|number| (1..=2000).contains(number));
        match number {
            Some(number) if !group.is_empty() => Ok(Self { group: group.to_owned(), number }),
            _ => Err(Error::invalid("node", text, "GROUP/NUMBER, with a number from 1 to 2000")),
        }
    }
}

/// Has the daemon declare a host dead.
pub(crate) async fn declare_dead(context: &Context, name: &str, force: bool) -> Result<(), Error> {
    let HostName { group, number: host } = HostName::parse(name)?;
    let mut client = context.client().await?;
    let steps = client.declare_host_dead(v1::DeclareHostDeadRequest { group, host, force }).await?;
    follow(&client, steps, name, ["declared dead", "was declared dead already"], context).await
}

/// Has the daemon forget a host.
pub(crate) async fn forget(context: &Context, name: &str, force: bool) -> Result<(), Error> {
    let HostName { group, number: host } = HostName::parse(name)?;
    let mut client = context.client().await?;
    let steps = client.forget_host(v1::ForgetHostRequest { group, host, force }).await?;
    follow(&client, steps, name, ["forgotten", "there was no such host"], context).await
}

/// Prints the steps of a call as they happen, or all at its end as JSON. `ends`: how a call ends
/// that has changed something, and one that has not.
async fn follow(
    client: &Client,
    mut steps: Streaming<v1::HostStep>,
    node: &str,
    ends: [&str; 2],
    context: &Context,
) -> Result<(), Error> {
    let mut shape = LeftShape { node: node.to_owned(), ..LeftShape::default() };
    let print = |text: String| match context.output.is_json() {
        true => Ok(()),
        // Steps after it may take long, or fail.
        false => context.output.text(&text),
    };
    loop {
        let step = match steps.message().await {
            Ok(Some(step)) => step,
            Ok(None) => {
                let (what, problem) =
                    ("the daemon's answer".to_owned(), "lacks its end".to_owned());
                return Err(Error::Unexpected { what, problem });
            }
            Err(status) => {
                // The cells that were dealt with are part of the output.
                if context.output.is_json() && !shape.cells.is_empty() {
                    shape.changed = true;
                    context.output.last_json(&shape)?;
                }
                return Err(client.failed(&status));
            }
        };
        if let Some(hook) = step.hook {
            let lines = hook.output.lines().map(|line| format!("  {line}\n"));
            print(format!("{}: done\n{}", hook.path, lines.collect::<String>()))?;
            shape.hooks.push(hook);
        }
        if let Some(cell) = step.cell {
            print(line(&cell))?;
            shape.cells.push(cell);
        }
        if let Some(end) = step.end {
            shape.changed = end.changed;
            let [changed, unchanged] = ends;
            let how = if end.changed { changed } else { unchanged };
            return context.output.either(&shape, || format!("host {}: {how}\n", shape.node));
        }
    }
}

fn line(cell: &v1::HostCell) -> String {
    let (name, changes) = (&cell.name, cell.log_changes);
    let how = match cell.outcome() {
        v1::HostCellOutcome::Released => {
            format!("taken over, {changes} change(s) replayed from its log, closed and released")
        }
        v1::HostCellOutcome::Kept => format!(
            "taken over, {changes} change(s) replayed from its log, open here as it was before, or \
             as volumes of it are attached"
        ),
        v1::HostCellOutcome::Elsewhere => "left alone, the host does not have it".to_owned(),
        v1::HostCellOutcome::Failed | v1::HostCellOutcome::Unspecified => {
            format!("not taken over: {}", cell.failure)
        }
    };
    format!("cell {name}: {how}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_with_its_group() {
        let host = HostName { group: "san".to_owned(), number: 2 };
        assert_eq!(HostName::parse("san/2").unwrap(), host);
        for text in ["3f2b8c1d", "san/", "/2", "san/0", "san/2001", "san/x", "san/1/2"] {
            let error = HostName::parse(text).unwrap_err().to_string();
            assert!(error.contains("must be GROUP/NUMBER"), "{error}");
        }
    }

    #[test]
    fn the_output_for_programs_has_each_script_and_each_cell() {
        let hook = v1::HookRun { path: "/a".to_owned(), output: "off".to_owned(), took_ms: 7 };
        let failed = v1::HostCell {
            name: "one".to_owned(),
            outcome: v1::HostCellOutcome::Failed.into(),
            failure: "why".to_owned(),
            log_changes: 0,
        };
        let node = "san/2".to_owned();
        let shape = LeftShape { changed: true, node, hooks: vec![hook], cells: vec![failed] };
        let expected = serde_json::json!({
            "changed": true,
            "node": "san/2",
            "hooks": [{ "path": "/a", "output": "off", "took_ms": 7 }],
            "cells": [{ "cell": "one", "outcome": "failed", "failure": "why", "log_changes": 0 }],
        });
        assert_eq!(serde_json::to_value(&shape).unwrap(), expected);
        assert_eq!(line(&shape.cells[0]), "cell one: not taken over: why\n");
    }
}
