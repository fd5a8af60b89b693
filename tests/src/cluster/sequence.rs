//! A file of a recording, read and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi_base::grpc::code_of_name;
use blockd_record::recording::{Call, End, Header, VERSION};
use blockd_testkit::tools;
use serde::Deserialize;
use serde_json::Value;

use super::step::Step;

/// Lines of a sequence: a recording of 64 MiB has fewer.
const MOST_LINES: usize = 1_000_000;

/// A sequence of calls and steps.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The file's name without its end.
    pub name: String,
    /// The first line.
    pub header: Header,
    /// Calls and steps by their start.
    pub(super) entries: Vec<Entry>,
}

/// A line of a sequence.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Its number in the file, from 1.
    pub(super) line: usize,
    pub(super) start_ms: f64,
    /// The end of a call; a step takes no time.
    pub(super) end_ms: f64,
    pub(super) action: Action,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Call { call: Box<Call>, retry: Option<Retry> },
    Step(Step),
}

/// A call that its caller repeats until it ends with another code.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Retry {
    pub(super) by: Caller,
    /// Codes after which it is repeated.
    pub(super) on: Vec<String>,
}

/// A caller with its pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Caller {
    Kubelet,
    Sidecar,
}

impl Caller {
    /// The pause before the repeat of this number, from 0.
    pub(super) fn pause(self, number: u32) -> Duration {
        let (first, most) = match self {
            // pkg/util/goroutinemap/exponentialbackoff of Kubernetes.
            Self::Kubelet => (Duration::from_millis(500), Duration::from_secs(122)),
            // --retry-interval-start and --retry-interval-max of the sidecars.
            Self::Sidecar => (Duration::from_secs(1), Duration::from_secs(300)),
        };
        first.saturating_mul(2_u32.saturating_pow(number)).min(most)
    }
}

impl Sequence {
    /// The sequences of this repository, by name.
    ///
    /// # Errors
    /// When one can't be read.
    pub fn all() -> Result<Vec<Self>> {
        Self::paths()?.iter().map(|path| Self::read(path)).collect()
    }

    /// Their files.
    ///
    /// # Errors
    /// When the folder can't be read.
    pub fn paths() -> Result<Vec<PathBuf>> {
        Self::in_folder(&tools::workspace_root().join("tests/cluster"))
    }

    /// The files of sequences in a folder, by name.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder);
        let entries = entries.with_context(|| format!("reading {}", folder.display()))?;
        let mut paths: Vec<PathBuf> =
            entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        paths.retain(|path| path.extension().is_some_and(|end| end == "jsonl"));
        paths.sort();
        Ok(paths)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it is no recording of this version, or a line is not one of it.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::parse(&name, &text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let mut lines = text.lines().zip(1..).take(MOST_LINES);
        let (first, _) = lines.next().with_context(|| format!("{name} is empty"))?;
        let header: Header =
            serde_json::from_str(first).with_context(|| format!("{name}:1 is no header"))?;
        let version = header.recording;
        ensure!(version == VERSION, "{name}:1: recording is {version}: must be {VERSION}");
        let mut entries = Vec::new();
        for (text, line) in lines {
            let entry = Entry::parse(text, line).with_context(|| format!("{name}:{line}"))?;
            entries.extend(entry);
        }
        entries.sort_by(|one, other| one.start_ms.total_cmp(&other.start_ms));
        Ok(Self { name: name.to_owned(), header, entries })
    }

    /// Whether it needs block devices, and so a machine with a driver for them.
    #[must_use]
    pub fn needs_devices(&self) -> bool {
        self.entries.iter().any(|entry| match &entry.action {
            Action::Call { call, .. } => {
                let (_, method) = call.method.rsplit_once('/').unwrap_or_default();
                method.starts_with("Node") && !method.starts_with("NodeGet")
            }
            Action::Step(step) => step.needs_devices(),
        })
    }

    /// Whether the machine is started anew in it.
    #[must_use]
    pub fn reboots(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.action, Action::Step(Step::Reboot {})))
    }

    /// Calls in it.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.entries.iter().filter(|entry| matches!(entry.action, Action::Call { .. })).count()
    }

    /// Its methods, without their services.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().filter_map(|entry| match &entry.action {
            Action::Call { call, .. } => call.method.rsplit_once('/').map(|(_, name)| name),
            Action::Step(_) => None,
        })
    }
}

impl Entry {
    /// A call or a step; `None` for the end.
    fn parse(text: &str, line: usize) -> Result<Option<Self>> {
        let mut json: Value = serde_json::from_str(text)?;
        let fields = json.as_object_mut().context("no object")?;
        if fields.contains_key("end") {
            serde_json::from_value::<End>(json)?;
            return Ok(None);
        }
        if fields.contains_key("step") {
            let start = fields.remove("start_ms").and_then(|time| time.as_f64());
            let start_ms = start.context("a step without start_ms")?;
            let step: Step = serde_json::from_value(json)?;
            return Ok(Some(Self { line, start_ms, end_ms: start_ms, action: Action::Step(step) }));
        }
        let retry = fields.remove("retry").map(serde_json::from_value::<Retry>).transpose()?;
        let call: Call = serde_json::from_value(json)?;
        let on = retry.iter().flat_map(|retry| &retry.on);
        if let Some(code) = on.chain([&call.code]).find(|code| code_of_name(code).is_none()) {
            bail!("{code} is no code of gRPC");
        }
        ensure!(call.end_ms >= call.start_ms, "the call ends before it starts");
        let (start_ms, end_ms) = (call.start_ms, call.end_ms);
        let action = Action::Call { call: Box::new(call), retry };
        Ok(Some(Self { line, start_ms, end_ms, action }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_callers_longest() {
        let seconds = |caller: Caller, number| caller.pause(number).as_secs_f64();
        assert!((seconds(Caller::Kubelet, 0) - 0.5).abs() < 1e-9);
        assert!((seconds(Caller::Kubelet, 3) - 4.0).abs() < 1e-9);
        assert!((seconds(Caller::Kubelet, 40) - 122.0).abs() < 1e-9);
        assert!((seconds(Caller::Sidecar, 0) - 1.0).abs() < 1e-9);
        assert!((seconds(Caller::Sidecar, 9) - 300.0).abs() < 1e-9);
    }

    #[test]
    fn bad_lines_are_named() {
        let header = r#"{"recording":1,"recorder":"x","callers":[],"started_unix_ms":0}"#;
        for (line, why) in [
            ("{}", "missing field"),
            ("1", "no object"),
            (r#"{"step":"fly","start_ms":1}"#, "fly"),
            (r#"{"step":"kill-daemon"}"#, "start_ms"),
            (
                r#"{"call":1,"connection":1,"start_ms":2,"end_ms":1,"method":"/a/b","code":"OK"}"#,
                "ends before",
            ),
            (
                r#"{"call":1,"connection":1,"start_ms":1,"end_ms":1,"method":"/a/b","code":"Ok"}"#,
                "no code",
            ),
        ] {
            let error = Sequence::parse("s", &format!("{header}\n{line}\n")).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.starts_with("s:2") && text.contains(why), "{text}");
        }
        let later = header.replace(":1,", ":2,");
        assert!(Sequence::parse("s", &later).unwrap_err().to_string().contains("must be 1"));
    }
}
