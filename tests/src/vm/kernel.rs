//! A kernel to boot, with its modules: the newest cloud kernel of the 6.12 line that Debian's
//! package manager knows, unpacked below the build folder and never installed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};

use crate::tools;

/// What the package manager is asked for. The unsigned form is the one that holds the kernel.
const PATTERN: &str = r"^linux-image-6\.12\..*-cloud-amd64-unsigned$";

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its release, as `uname -r` will say.
    pub release: String,
    /// What qemu boots.
    pub image: PathBuf,
    /// The folder that holds `modules.dep` and `kernel/`.
    modules: PathBuf,
}

impl Kernel {
    /// The kernel of the cache; fetched when there is none yet.
    ///
    /// # Errors
    /// When there is none and the package manager has none either.
    pub fn get() -> Result<Self> {
        let cache = tools::build_folder()?.join("vm/kernel");
        fs::create_dir_all(&cache)?;
        // Tests of several processes may come here at once: one of them fetches.
        let lock = fs::File::create(cache.join("lock"))?;
        lock.lock().context("waiting for another process that fetches a kernel")?;
        if let Some(kernel) = Self::newest(&cache)? {
            return Ok(kernel);
        }
        fetch(&cache).context("fetching a kernel for virtual machines")?;
        Self::newest(&cache)?.context("the fetched package holds no kernel")
    }

    /// The newest one that is complete. Packages are compared by name, so that at most one is
    /// fetched; the cache holds one as a rule.
    fn newest(cache: &Path) -> Result<Option<Self>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(cache)? {
            let root = entry?.path();
            if root.join("complete").exists() {
                found.push(root);
            }
        }
        found.sort_by_key(|root| numbers(&root.to_string_lossy()));
        let Some(root) = found.pop() else { return Ok(None) };
        let release = fs::read_to_string(root.join("complete"))?;
        Ok(Some(Self {
            image: root.join("boot").join(format!("vmlinuz-{release}")),
            modules: modules_folder(&root, &release),
            release,
        }))
    }

    /// These modules and all that they need, in the order in which they can be loaded. What is
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

fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

/// Packages put modules below `/lib` or below `/usr/lib`.
fn modules_folder(root: &Path, release: &str) -> PathBuf {
    let merged = root.join("usr/lib/modules").join(release);
    if merged.exists() { merged } else { root.join("lib/modules").join(release) }
}

fn fetch(cache: &Path) -> Result<()> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb", "depmod", "xz"] {
        tools::find(tool)?;
    }
    let package = match newest_package()? {
        Some(package) => package,
        None => {
            // A fresh machine has no list of packages yet.
            tools::output(Command::new("apt-get").args(["-q", "update"]))?;
            newest_package()?.with_context(|| format!("no package matches {PATTERN}"))?
        }
    };
    let root = cache.join(&package);
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root)?;
    eprintln!("fetching {package}");
    tools::output(Command::new("apt-get").args(["-q", "download", &package]).current_dir(&root))?;
    let file = fs::read_dir(&root)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("nothing was downloaded")?;
    tools::output(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(&root))?;
    fs::remove_file(&file)?;
    let release = fs::read_dir(root.join("boot"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned()))
        .with_context(|| format!("{package} holds no kernel"))?;
    // depmod looks below lib/modules only.
    let merged = root.join("usr/lib/modules");
    let base = if merged.exists() { root.join("usr") } else { root.clone() };
    tools::output(Command::new("depmod").arg("--basedir").arg(&base).arg(&release))?;
    // Written last: without it the folder is half done.
    fs::write(root.join("complete"), &release)?;
    Ok(())
}

/// The newest package of the pattern by the package manager's own order of versions.
fn newest_package() -> Result<Option<String>> {
    let found = tools::text(Command::new("apt-cache").args(["search", "--names-only", PATTERN]))?;
    let mut names: Vec<&str> =
        found.lines().filter_map(|line| line.split_once(" - ")).map(|(name, _)| name).collect();
    names.sort_by_key(|name| numbers(name));
    Ok(names.pop().map(ToOwned::to_owned))
}

/// The numbers in a name, by which versions compare as one expects: 6.12.9 is before 6.12.10.
fn numbers(name: &str) -> Vec<u64> {
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
    fn a_module_is_known_by_its_name_in_the_kernel() {
        assert_eq!(module_name("kernel/drivers/md/dm-delay.ko.xz"), "dm_delay");
        assert_eq!(module_name("kernel/fs/ext4/ext4.ko"), "ext4");
    }
}
