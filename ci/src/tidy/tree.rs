//! The files of the repository, read once.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Folders that hold no sources of ours.
const SKIPPED: [&str; 3] = [".git", ".cache", "target"];

/// Kinds of file that are read. Others (images, golden pool images) are known by name only.
const READ: [&str; 9] = ["rs", "md", "toml", "py", "yml", "yaml", "proto", "sh", "fio"];

/// One file.
#[derive(Debug, Clone)]
pub(super) struct File {
    /// Relative to the root, with `/` between the parts.
    pub(super) path: String,
    /// `None` when the file is of a kind that is not read.
    pub(super) text: Option<String>,
    pub(super) executable: bool,
}

/// All files, in the order of their paths.
#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) files: Vec<File>,
}

impl Tree {
    /// Walks the folder. A walk, not git, so that an unpacked archive can be checked too.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.walk(root, "")?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(tree)
    }

    fn walk(&mut self, root: &Path, prefix: &str) -> Result<()> {
        let dir = root.join(prefix);
        let entries =
            std::fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            let kind = entry.file_type()?;
            if kind.is_dir() {
                let skipped = SKIPPED.contains(&name.as_str()) || name.starts_with("target-");
                if !skipped {
                    self.walk(root, &path)?;
                }
            } else if kind.is_file() {
                self.files.push(read_file(root, path)?);
            }
        }
        Ok(())
    }

    /// Files of this extension whose text was read.
    pub(super) fn texts<'a>(
        &'a self,
        extension: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(move |file| file.path.rsplit_once('.').is_some_and(|(_, e)| e == extension))
            .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
    }

    /// The text of one file.
    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|file| file.path == path)?.text.as_deref()
    }

    /// Whether there is a file or a folder of this name.
    pub(super) fn has(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        path.is_empty()
            || self.files.iter().any(|file| file.path == path || file.path.starts_with(&folder))
    }
}

fn read_file(root: &Path, path: String) -> Result<File> {
    let full = root.join(&path);
    let context = || format!("reading {}", full.display());
    let mode = std::fs::metadata(&full).with_context(context)?.permissions().mode();
    let extension = path.rsplit_once('.').map(|(_, extension)| extension);
    let wanted = extension.is_some_and(|e| READ.contains(&e)) || path.starts_with(".ci/");
    let text =
        if wanted { Some(std::fs::read_to_string(&full).with_context(context)?) } else { None };
    Ok(File { path, text, executable: mode & 0o111 != 0 })
}

#[cfg(test)]
pub(super) mod testing {
    use super::{File, Tree};

    /// A tree of these paths and texts.
    pub(in crate::tidy) fn tree(files: &[(&str, &str)]) -> Tree {
        let file = |&(path, text): &(&str, &str)| File {
            path: path.to_owned(),
            text: Some(text.to_owned()),
            executable: false,
        };
        Tree { files: files.iter().map(file).collect() }
    }
}
