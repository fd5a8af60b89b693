//! The file of the attachments. A change is added to its end, so that one costs the same however
//! many volumes are attached; from time to time the file is replaced by one without what has
//! changed since.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use blockd_media::error::Error;
use serde::{Deserialize, Serialize};

use super::Record;
use crate::services::state_file::{self, StateFile};

/// Of the format below. Version 1 is one list that was always replaced as a whole.
const VERSION: u32 = 2;

/// Lines beyond twice the attachments that are there: these are cheaper to read at the next start
/// than to write away now.
const SPARE_LINES: usize = 1024;

/// The first line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    version: u32,
}

/// A line after the first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Change {
    /// An attachment, or what it has become.
    Attached(Record),
    /// The pool and the volume.
    Detached(String, String),
    /// The pool, the volume's former name and its name now. One line, so that a crash leaves the
    /// attachment under one of the two.
    Renamed(String, String, String),
}

/// The file, and the end to which changes are added.
#[derive(Debug)]
pub(super) struct Log {
    file: StateFile,
    /// Not until this process has written it as a whole: the last line of a process that was killed
    /// may be half there.
    end: Option<End>,
    /// Whether each of the next writes fails.
    #[cfg(test)]
    pub(super) failing: std::collections::VecDeque<bool>,
}

#[derive(Debug)]
struct End {
    file: File,
    bytes: u64,
    lines: usize,
}

impl Log {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self {
            file: StateFile::new(state_dir, "attachments.json"),
            end: None,
            #[cfg(test)]
            failing: std::collections::VecDeque::new(),
        }
    }

    /// Reads all changes, in order; none if there is no file. A last line without an end was not
    /// acknowledged, and is left out. Any other damage is an error: attachments would be lost.
    pub(super) fn read(&self) -> Result<Vec<Change>, Error> {
        let file = &self.file;
        let Some(text) = file.read_bytes()? else { return Ok(Vec::new()) };
        let mut lines = text.split_inclusive(|byte| *byte == b'\n');
        let head = lines.next().and_then(|line| serde_json::from_slice::<Head>(line).ok());
        if head.is_none_or(|head| head.version != VERSION) {
            // Of an older version, or damaged.
            return Ok(file.parse(&text)?.into_iter().map(Change::Attached).collect());
        }
        let whole = lines.enumerate().filter(|(_, line)| line.ends_with(b"\n"));
        whole
            .map(|(number, line)| {
                serde_json::from_slice(line)
                    .map_err(|error| file.corrupt(&format!("line {}: {error}", number + 2)))
            })
            .collect()
    }

    /// Has the next write replace the file: its changes are there all at once.
    pub(super) fn replace_next(&mut self) {
        self.end = None;
    }

    /// Adds changes durably. After an error they do not count; where the error came after the file
    /// was written, the next start can find them nevertheless, until another change replaces it.
    /// `all` says what is attached with these changes, and `count` how many that are.
    pub(super) fn write(
        &mut self,
        changes: &[Change],
        count: usize,
        all: impl FnOnce() -> Vec<Record>,
    ) -> Result<(), Error> {
        #[cfg(test)]
        if self.failing.pop_front() == Some(true) {
            let error = std::io::ErrorKind::StorageFull.into();
            return Err(Error::file("write", self.file.path(), error));
        }
        let most = count.saturating_mul(2).saturating_add(SPARE_LINES);
        let end = self.end.take().filter(|end| end.lines + changes.len() <= most);
        let written = match end {
            Some(end) => end.add(changes),
            None => End::replace(self.file.path(), all()),
        };
        self.end = Some(written.map_err(|error| Error::file("write", self.file.path(), error))?);
        Ok(())
    }
}

impl End {
    fn replace(path: &Path, all: Vec<Record>) -> std::io::Result<Self> {
        let mut text = Vec::new();
        push_line(&mut text, &Head { version: VERSION })?;
        let lines = all.len();
        for record in all {
            push_line(&mut text, &Change::Attached(record))?;
        }
        let file = state_file::replace(path, &text)?;
        Ok(Self { file, bytes: text.len() as u64, lines })
    }

    fn add(mut self, changes: &[Change]) -> std::io::Result<Self> {
        let mut text = Vec::new();
        for change in changes {
            push_line(&mut text, change)?;
        }
        let added = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        if let Err(error) = added {
            // The next change replaces the file; until then, the next start must not find this.
            let _ = self.file.set_len(self.bytes).and_then(|()| self.file.sync_data());
            return Err(error);
        }
        self.bytes += text.len() as u64;
        self.lines += changes.len();
        Ok(self)
    }
}

/// Adds a value as a line of JSON.
fn push_line(text: &mut Vec<u8>, value: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *text, value)?;
    text.push(b'\n');
    Ok(())
}
