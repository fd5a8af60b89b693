//! A kernel to boot, with its modules: a cloud kernel of Debian's, of the 6.12 line or newer.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use blockd_testkit::tools;

use super::fetch;

/// Which of the kernels that tests run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Which {
    /// 6.12, whose ublk has recovery and little else.
    #[default]
    Older,
    /// 7.0 or newer: zero copy, resizing in use, quiescing.
    Newer,
}

impl Which {
    /// The kernels that `--kernel` selects: `6.12`, `7` or `all`.
    ///
    /// # Errors
    /// When the word is another one.
    pub fn chosen(word: &str) -> Result<Vec<Self>> {
        match word {
            "6.12" => Ok(vec![Self::Older]),
            "7" => Ok(vec![Self::Newer]),
            "all" => Ok(vec![Self::Older, Self::Newer]),
            _ => bail!("kernel {word:?}: 6.12, 7 and all are known"),
        }
    }

    /// The kernel of this word, or the older one where the newer one can't be had. A note
    /// says so, with the consequences.
    ///
    /// # Errors
    /// When the word is not that of one kernel, or the older one can't be had.
    pub fn newer_or_older(word: &str, lost: &str) -> Result<Self> {
        let [which] = Self::chosen(word)?[..] else {
            bail!("kernel {word:?}: one of 6.12 and 7");
        };
        match Kernel::get(which) {
            Ok(_) => Ok(which),
            Err(error) if which == Self::Newer => {
                println!("note: no kernel {word}, so 6.12, and {lost}: {error:#}");
                Ok(Self::Older)
            }
            Err(error) => Err(error),
        }
    }

    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Older => "6.12",
            Self::Newer => "7",
        }
    }

    /// Whether a release is of this kind.
    #[must_use]
    pub fn is(self, release: &str) -> bool {
        let numbers = numbers(release);
        match self {
            Self::Older => numbers.starts_with(&[6, 12]),
            Self::Newer => numbers.first().is_some_and(|&major| major >= 7),
        }
    }
}

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its release, as `uname -r` prints it.
    pub release: String,
    /// The image that qemu boots.
    pub image: PathBuf,
    /// The folder that holds `modules.dep` and `kernel/`.
    modules: PathBuf,
}

impl Kernel {
    /// The kernel of the cache; fetched when there is none yet.
    ///
    /// # Errors
    /// When there is none and the package manager has none either.
    pub fn get(which: Which) -> Result<Self> {
        let cache = tools::build_folder()?.join("vm/kernel");
        fs::create_dir_all(&cache)?;
        // Tests of several processes may come here at once: one of them fetches.
        let lock = fs::File::create(cache.join("lock"))?;
        lock.lock().context("waiting for another process that fetches a kernel")?;
        if let Some(kernel) = Self::newest(which, &cache)? {
            return Ok(kernel);
        }
        fetch::fetch(which, &cache)
            .with_context(|| format!("fetching kernel {} for virtual machines", which.name()))?;
        Self::newest(which, &cache)?.context("the fetched package holds no kernel")
    }

    /// The newest one that is complete. Packages are compared by name, so that at most one is
    /// fetched; the cache holds one as a rule.
    fn newest(which: Which, cache: &Path) -> Result<Option<Self>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(cache)? {
            let root = entry?.path();
            // Written when all else is there.
            let Ok(release) = fs::read_to_string(root.join("complete")) else { continue };
            if which.is(&release) {
                found.push((release, root));
            }
        }
        found.sort_by_key(|(release, _)| numbers(release));
        let Some((release, root)) = found.pop() else { return Ok(None) };
        let modules = modules_folder(&root, &release);
        // The image lies in /boot, or in newer packages beside the modules.
        let boot = root.join("boot").join(format!("vmlinuz-{release}"));
        let image = if boot.exists() { boot } else { modules.join("vmlinuz") };
        Ok(Some(Self { release, image, modules }))
    }

    /// The modules and all that they need, in the order in which they can be loaded. What is
    /// built into the kernel is left out.
    ///
    /// # Errors
    /// When the kernel has no module of a name, built in or not.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let text = fs::read_to_string(self.modules.join("modules.dep"))?;
        let mut needs = BTreeMap::new();
        for line in text.lines() {
            let (file, rest) = line.split_once(':').context("a line of modules.dep")?;
            needs.insert(file, rest.split_whitespace().collect::<Vec<_>>());
        }
        let by_name: BTreeMap<String, &str> =
            needs.keys().map(|file| (module_name(file), *file)).collect();
        let built_in = fs::read_to_string(self.modules.join("modules.builtin"))?;
        let built_in: BTreeSet<String> = built_in.lines().map(module_name).collect();
        let mut order: Vec<&str> = Vec::new();
        for name in names.iter().map(|name| name.replace('-', "_")) {
            match by_name.get(&name) {
                // `modules.dep` lists what a module needs with the deepest last.
                Some(file) => {
                    order.extend(needs[file].iter().rev());
                    order.push(file);
                }
                None if built_in.contains(&name) => {}
                None => bail!("kernel {} has no module {name}", self.release),
            }
        }
        let mut seen = BTreeSet::new();
        order.retain(|file| seen.insert(*file));
        order.iter().map(|file| self.plain_module(file)).collect()
    }

    /// Decompressed, since the guest's busybox only loads plain ones. Kept beside the original.
    fn plain_module(&self, file: &str) -> Result<PathBuf> {
        let packed = self.modules.join(file);
        if packed.extension().is_none_or(|extension| extension != "xz") {
            return Ok(packed);
        }
        let plain = packed.with_extension("");
        if !plain.exists() {
            let bytes =
                tools::output(Command::new("xz").args(["--decompress", "--stdout"]).arg(&packed))?;
            // Renamed into place, or a test beside us might read a half of it: one of another
            // process, or of another thread of this one.
            static PARTS: AtomicU64 = AtomicU64::new(0);
            let part = PARTS.fetch_add(1, Ordering::Relaxed);
            let part = plain.with_extension(format!("{}-{part}", std::process::id()));
            fs::write(&part, bytes)?;
            fs::rename(&part, &plain)?;
        }
        Ok(plain)
    }
}

pub(super) fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

/// Packages put modules below `/lib` or below `/usr/lib`.
fn modules_folder(root: &Path, release: &str) -> PathBuf {
    let merged = root.join("usr/lib/modules").join(release);
    if merged.exists() { merged } else { root.join("lib/modules").join(release) }
}

/// The numbers in a name, by which versions compare as one expects: 6.12.9 is before 6.12.10.
pub(super) fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(numbers("linux-image-6.12.9-cloud") < numbers("linux-image-6.12.10-cloud"));
    }

    #[test]
    fn the_kind_of_a_kernel_is_known_from_its_release() {
        assert!(Which::Older.is("6.12.9+deb12-cloud-amd64") && !Which::Newer.is("6.12.9-cloud"));
        assert!(Which::Newer.is("7.2.12+deb14-cloud-amd64") && Which::Newer.is("10.0.1"));
        assert!(!Which::Older.is("6.1.12") && !Which::Newer.is("6.19.3"));
        assert!(Which::chosen("6").is_err());
    }

    #[test]
    fn a_module_is_known_by_its_name_in_the_kernel() {
        assert_eq!(module_name("kernel/drivers/md/dm-delay.ko.xz"), "dm_delay");
        assert_eq!(module_name("kernel/fs/ext4/ext4.ko"), "ext4");
    }
}
