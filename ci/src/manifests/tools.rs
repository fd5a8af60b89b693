//! Helm, schemas and kustomize, fetched where this machine has none.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{command, setup};

const SCRIPT: &str = "ci/manifests/render.py";
const REQUIREMENTS: &str = "ci/manifests/requirements.txt";

/// Marks that a folder has all of its packages; has in it which.
const COMPLETE: &str = "complete";

/// The first kubectl whose kustomize has the features that the components use.
const KUBECTL_MINOR: u64 = 27;

/// The document with an example of an overlay, and the words before the example.
const DOCUMENT: &str = "docs/KUBERNETES.md";
const OVERLAY: &str = "An overlay is a folder";

const KUBECTL: setup::Tool = setup::Tool { program: "kubectl", package: "kubernetes-client" };

/// The longest that rendering may take: it needs a second.
const LIMIT: Duration = Duration::from_secs(120);

/// Where tools are kept.
///
/// # Errors
/// When it can't be made.
pub(super) fn folder(root: &Path) -> Result<PathBuf> {
    let folder = command::target_dir(root).join("tools");
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Passes the input to the script, and returns its output.
///
/// # Errors
/// When it can't run, or fails.
pub(super) fn render(root: &Path, asked: &Value) -> Result<Value> {
    let packages = packages(root)?;
    let mut command = Command::new(setup::PYTHON.program);
    command.arg(root.join(SCRIPT)).env("PYTHONPATH", &packages).env("PYTHONDONTWRITEBYTECODE", "1");
    let rendered = command::answer(&mut command, asked.to_string().as_bytes(), LIMIT)?;
    serde_json::from_str(&rendered).with_context(|| format!("reading the output of {SCRIPT}"))
}

/// The packages of the script, in a folder of their own below the build folder.
fn packages(root: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(root.join(REQUIREMENTS)).context(REQUIREMENTS)?;
    let folder = folder(root)?.join("python");
    if fs::read_to_string(folder.join(COMPLETE)).is_ok_and(|have| have == wanted) {
        return Ok(folder);
    }
    setup::ensure(&[setup::PYTHON])?;
    let pip = || {
        let mut command = Command::new(setup::PYTHON.program);
        command.args(["-m", "pip"]).stdin(Stdio::null());
        command
    };
    if command::output(pip().arg("--version")).is_err() {
        setup::ensure(&[setup::Tool { program: "pip3", package: "python3-pip" }])?;
    }
    let _ = fs::remove_dir_all(&folder);
    let mut install = pip();
    install.args(["install", "--quiet", "--no-deps", "--no-compile", "--no-cache-dir"]);
    install.args(["--disable-pip-version-check", "--root-user-action=ignore", "--target"]);
    command::output(install.arg(&folder).arg("--requirement").arg(root.join(REQUIREMENTS)))?;
    trim(&folder)?;
    // Written last: an incomplete file is not taken for whole.
    fs::write(folder.join(COMPLETE), wanted)?;
    println!("manifests: installed {}", folder.display());
    Ok(folder)
}

/// Removes files of hundreds of megabytes that are never read: the library under its other names,
/// and schemas of older versions.
fn trim(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder.join("helm_python/lib"))? {
        let entry = entry?;
        if entry.file_name() != "libhelm_c.so" {
            fs::remove_file(entry.path())?;
        }
    }
    let schemas = folder.join("kubernetes_validate/kubernetes-json-schema");
    for entry in fs::read_dir(schemas)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("v1.37.") {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// kubectl, if it knows components; installed where there is none.
///
/// # Errors
/// When there is none and it can't be installed.
pub(super) fn kubectl() -> Result<Option<&'static str>> {
    setup::ensure(&[KUBECTL])?;
    let mut asked = Command::new(KUBECTL.program);
    let version = command::output(asked.args(["version", "--client", "--output", "json"]))?;
    let version: Value = serde_json::from_str(&version).context("kubectl's version")?;
    let minor = version["clientVersion"]["minor"].as_str().unwrap_or_default();
    let minor = minor.trim_end_matches(|c: char| !c.is_ascii_digit());
    let minor: u64 = minor.parse().context("kubectl's version")?;
    Ok((minor >= KUBECTL_MINOR).then_some(KUBECTL.program))
}

/// A file with kustomize's rendering of the base, with a component if one is named.
///
/// # Errors
/// When it can't be built.
pub(super) fn built(
    kubectl: &str,
    root: &Path,
    folder: &Path,
    component: Option<&str>,
) -> Result<PathBuf> {
    let name = component.unwrap_or("base");
    // Paths have to be relative: both folders are followed from the root of the file system.
    let from = folder.join(name).canonicalize().or_else(|_| {
        fs::create_dir_all(folder.join(name))?;
        folder.join(name).canonicalize()
    })?;
    let up = "../".repeat(from.components().count() - 1);
    let root = root.canonicalize()?;
    let below = root.strip_prefix("/").unwrap_or(&root).display();
    let mut text = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - \
         {up}{below}/{}\n",
        super::BASE
    );
    if let Some(component) = component {
        text.push_str(&format!("components:\n  - {up}{below}/{}/{component}\n", super::COMPONENTS));
    }
    kustomized(kubectl, &from, &text)
}

/// A file with kustomize's rendering of the overlay in the documentation. It is built as a reader
/// builds it: in a folder beside one that is called `blockd`, from another working directory.
///
/// # Errors
/// When the document has none, or it can't be built.
pub(super) fn documented_overlay(kubectl: &str, root: &Path, folder: &Path) -> Result<PathBuf> {
    let document = fs::read_to_string(root.join(DOCUMENT)).context(DOCUMENT)?;
    let block = document.split_once(OVERLAY).and_then(|(_, rest)| rest.split_once("```yaml\n"));
    let block = block.and_then(|(_, rest)| rest.split_once("```")).map(|(block, _)| block);
    let block = block.with_context(|| format!("{DOCUMENT} has no example after {OVERLAY:?}"))?;
    let beside = folder.join("reader");
    let _ = fs::remove_dir_all(&beside);
    let overlay = beside.join("overlay");
    fs::create_dir_all(&overlay)?;
    std::os::unix::fs::symlink(root.canonicalize()?, beside.join("blockd"))?;
    kustomized(kubectl, &overlay.canonicalize()?, block)
}

/// Writes a `kustomization.yaml` into a folder, and its rendering into a file beside the folder.
fn kustomized(kubectl: &str, overlay: &Path, text: &str) -> Result<PathBuf> {
    fs::write(overlay.join("kustomization.yaml"), text)?;
    let mut build = Command::new(kubectl);
    let output = command::output(build.arg("kustomize").arg(overlay).current_dir("/"))?;
    let name = overlay.display();
    ensure!(output.contains("kind: DaemonSet"), "{name}: kustomize builds no DaemonSet");
    let file = overlay.with_extension("yaml");
    fs::write(&file, output)?;
    Ok(file)
}
