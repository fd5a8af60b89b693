//! The folders that the kubelet makes before calls and removes after them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// Makes the folders that a call finds: `MountDevice`, `SetUpAt` and the block mapper make them.
pub(super) fn before(method: &str, request: &Value) -> Result<()> {
    let folder = match method {
        "NodeStageVolume" => path(request, "staging_target_path"),
        "NodePublishVolume" => {
            path(request, "target_path").and_then(|path| Some(path.parent()?.to_path_buf()))
        }
        _ => None,
    };
    match folder {
        Some(folder) => {
            fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))
        }
        None => Ok(()),
    }
}

/// Removes the folders that a call has left empty: `removeMountDir` and the clean-up of orphaned
/// pods do that.
pub(super) fn after(method: &str, request: &Value, kubelet_dir: &Path) {
    let folder = match method {
        "NodeUnstageVolume" => path(request, "staging_target_path"),
        "NodeUnpublishVolume" => path(request, "target_path"),
        _ => None,
    };
    let Some(folder) = folder.filter(|folder| folder.starts_with(kubelet_dir)) else { return };
    let kept = [kubelet_dir.join("pods"), kubelet_dir.join("plugins/kubernetes.io/csi")];
    // A folder that is not empty, or has a mount, stays, and so do those around it.
    let up = folder.ancestors().take_while(|one| !kept.iter().any(|kept| kept == one));
    for (index, one) in up.enumerate() {
        if fs::remove_dir(one).is_err() && (index > 0 || one.exists()) {
            return;
        }
    }
}

fn path(request: &Value, field: &str) -> Option<PathBuf> {
    request[field].as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
}
