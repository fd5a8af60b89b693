//! The journal of a pool of namespaces: the state and the intended state of each.
//!
//! A file with a checksum, replaced as a whole and durably at each change. A replacement that a
//! crash cut short is overwritten by the next.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use blockd_media::error::Error;
use serde::{Deserialize, Serialize};

/// The first words of the file, with the version.
const HEAD: &str = "blockd-direct 1";
/// Largest file that is read: far above what a region's labels have room for.
const MAX_BYTES: u64 = 16 << 20;

/// The intended state of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Intent {
    /// The namespace is being created, and not clean yet: after a crash it is removed.
    Creating,
    /// The namespace can be used.
    Ready,
    /// The namespace is overwritten with zeroes, and then removed.
    Scrubbing,
    /// The namespace is being removed.
    Deleting,
}

/// A namespace of the pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    /// Which: it is known by nothing else.
    pub(super) uuid: String,
    pub(super) name: String,
    /// A number of its own, never used twice in the pool.
    pub(super) id: u32,
    pub(super) intent: Intent,
    /// `app-direct` or `file-io`.
    pub(super) usage: super::Usage,
    pub(super) requested_bytes: u64,
    pub(super) charged_bytes: u64,
    /// 0 until it is there.
    pub(super) usable_bytes: u64,
    pub(super) erase_after: bool,
    pub(super) made_unix_ms: i64,
    /// For one that is being overwritten: the bytes that are surely done.
    pub(super) scrubbed_bytes: u64,
    /// The new size of a namespace that is being grown: for a moment it may be larger. It must not
    /// be used meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) grows_to: Option<u64>,
    /// Where in its region it began then: elsewhere, all of its bytes are other ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) grows_at: Option<u64>,
    /// From this byte on, its namespace may hold data of another volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) dirty_from: Option<u64>,
}

impl Record {
    /// Whether it is being grown, or was when a daemon died.
    pub(super) fn grows(&self) -> bool {
        self.grows_to.is_some() || self.dirty_from.is_some()
    }
}

/// The content of the file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Content {
    /// The pool's own uuid.
    pub(super) pool: String,
    /// Where all of them are.
    pub(super) region: String,
    pub(super) next_id: u32,
    /// Something was removed without being overwritten, so that space that is free may hold it.
    #[serde(default)]
    pub(super) has_remains: bool,
    pub(super) records: Vec<Record>,
}

/// The file.
#[derive(Clone, Debug)]
pub(super) struct Journal(PathBuf);

impl Journal {
    pub(super) fn new(state_dir: &Path, pool: &str) -> Self {
        Self(state_dir.join(format!("direct-{pool}.journal")))
    }

    /// Reads the file; `None` if it does not exist. A file that cannot be parsed is an error, as
    /// the owned namespaces would be forgotten otherwise.
    pub(super) fn read(&self) -> Result<Option<Content>, Error> {
        let path = &self.0;
        let length = match fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::file("read", path, error)),
        };
        if length > MAX_BYTES {
            return Err(self.corrupt(&format!("{length} bytes, {MAX_BYTES} at most")));
        }
        let bytes = fs::read(path).map_err(|error| Error::file("read", path, error))?;
        decode(&bytes).map(Some).map_err(|problem| self.corrupt(&problem))
    }

    fn corrupt(&self, problem: &str) -> Error {
        let problem = format!(
            "{problem}; put back a copy of it: without it, it is unknown which namespaces are the \
             pool's"
        );
        Error::Corrupt { what: self.0.display().to_string(), problem }
    }

    /// Replaces it, durably.
    pub(super) fn write(&self, content: &Content) -> Result<(), Error> {
        let path = &self.0;
        let failed = |error| Error::file("write", path, error);
        let next = path.with_extension("journal.next");
        let text = encode(content).map_err(|error| failed(error.into()))?;
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&next)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&next, path))
            .map_err(failed)?;
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

fn encode(content: &Content) -> Result<Vec<u8>, serde_json::Error> {
    let body = serde_json::to_vec_pretty(content)?;
    let mut text = format!("{HEAD} {:08x} {}\n", crc32c::crc32c(&body), body.len()).into_bytes();
    text.extend(body);
    text.push(b'\n');
    Ok(text)
}

fn decode(bytes: &[u8]) -> Result<Content, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("no first line")?;
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| "no text in the first line")?;
    let rest = head.strip_prefix(HEAD).ok_or_else(|| {
        let shown: String = head.chars().take(40).collect();
        format!("it begins with {shown:?}, not {HEAD:?}")
    })?;
    let mut words = rest.split_whitespace();
    let sum = words.next().and_then(|word| u32::from_str_radix(word, 16).ok());
    let length = words.next().and_then(|word| word.parse::<usize>().ok());
    let (sum, length) = sum.zip(length).ok_or("no checksum and length in the first line")?;
    let body = bytes.get(end + 1..).and_then(|body| body.get(..length));
    let body = body.ok_or_else(|| format!("it is shorter than the {length} bytes that it says"))?;
    let found = crc32c::crc32c(body);
    if found != sum {
        return Err(format!("checksum {found:08x}, {sum:08x} expected"));
    }
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::Usage;
    use crate::services::testing::folder;

    fn content() -> Content {
        Content {
            pool: "00000000-0000-4000-8000-000000000001".to_owned(),
            region: "0x1".to_owned(),
            next_id: 2,
            has_remains: false,
            records: vec![Record {
                uuid: "00000000-0000-4000-8000-000000000002".to_owned(),
                name: "a".to_owned(),
                id: 1,
                intent: Intent::Ready,
                usage: Usage::AppDirect,
                requested_bytes: 1,
                charged_bytes: 3,
                usable_bytes: 2,
                erase_after: true,
                made_unix_ms: 5,
                scrubbed_bytes: 0,
                grows_to: None,
                grows_at: None,
                dirty_from: None,
            }],
        }
    }

    /// The file of this version stays readable: its form is written down here.
    #[test]
    fn the_form_of_the_file_stays_what_it_is() {
        let text = String::from_utf8(encode(&content()).unwrap()).unwrap();
        let expected = r#"blockd-direct 1 SUM LENGTH
{
  "pool": "00000000-0000-4000-8000-000000000001",
  "region": "0x1",
  "next_id": 2,
  "has_remains": false,
  "records": [
    {
      "uuid": "00000000-0000-4000-8000-000000000002",
      "name": "a",
      "id": 1,
      "intent": "ready",
      "usage": "app-direct",
      "requested_bytes": 1,
      "charged_bytes": 3,
      "usable_bytes": 2,
      "erase_after": true,
      "made_unix_ms": 5,
      "scrubbed_bytes": 0
    }
  ]
}
"#;
        let body = expected.split_once('\n').unwrap().1.trim_end();
        let sum = format!("{:08x}", crc32c::crc32c(body.as_bytes()));
        let length = body.len().to_string();
        assert_eq!(text, expected.replacen("SUM", &sum, 1).replacen("LENGTH", &length, 1));
        assert_eq!(decode(text.as_bytes()), Ok(content()));
        // As it was before that was noted.
        let body = body.replace("  \"has_remains\": false,\n", "");
        let (sum, length) = (crc32c::crc32c(body.as_bytes()), body.len());
        let text = format!("blockd-direct 1 {sum:08x} {length}\n{body}\n");
        assert_eq!(decode(text.as_bytes()), Ok(content()));
    }

    /// Each byte is damaged in turn, and each length tried: none is taken for something else.
    #[test]
    fn damage_is_found_wherever_it_is() {
        let good = encode(&content()).unwrap();
        for at in 0..good.len() - 1 {
            let mut bad = good.clone();
            bad[at] ^= 0x21;
            if let Ok(content) = decode(&bad) {
                // Blanks of the first line, or digits of its checksum in capitals.
                assert_eq!(content, super::tests::content(), "byte {at}");
            }
            assert!(at == good.len() - 1 || decode(&good[..at]).is_err(), "{at} bytes");
        }
        assert!(decode(b"").is_err() && decode(b"{}").is_err());
    }

    #[test]
    fn a_replacement_that_was_cut_short_is_no_hindrance() {
        let folder = folder();
        let journal = Journal::new(folder.path(), "p");
        assert_eq!(journal.read().unwrap(), None);
        fs::write(folder.path().join("direct-p.journal.next"), "half").unwrap();
        journal.write(&content()).unwrap();
        assert_eq!(journal.read().unwrap(), Some(content()));
        fs::write(folder.path().join("direct-p.journal"), "half").unwrap();
        let error = journal.read().unwrap_err().to_string();
        assert!(error.contains("direct-p.journal") && error.contains("put back a copy"), "{error}");
    }
}
