//! The life of a volume as the container orchestrator calls for it, and what is left after it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use blockd_csi::proto::{
    ControllerExpandVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest,
    NodeExpandVolumeRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
    VolumeContentSource,
};

use crate::csi::rig::Rig;
use crate::csi::{Answer, Driver, range};

/// How a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::workload) enum Shape {
    Mount(&'static str),
    Block,
    Inline,
}

/// A capability of this shape.
pub(in crate::workload) fn capability(shape: Shape, mode: Mode) -> VolumeCapability {
    let access = match shape {
        Shape::Block => AccessType::Block(BlockVolume {}),
        Shape::Mount(fs_type) => mount(fs_type),
        Shape::Inline => mount("ext4"),
    };
    let access_mode = Some(AccessMode { mode: mode.into() });
    VolumeCapability { access_mode, access_type: Some(access) }
}

fn mount(fs_type: &str) -> AccessType {
    AccessType::Mount(MountVolume { fs_type: fs_type.to_owned(), ..Default::default() })
}

/// A volume and its paths.
#[derive(Clone, Debug)]
pub(in crate::workload) struct Volume {
    pub(in crate::workload) name: String,
    pub(in crate::workload) shape: Shape,
    pub(in crate::workload) mode: Mode,
    pub(in crate::workload) size: i64,
    /// Of its storage class.
    pub(in crate::workload) parameters: HashMap<String, String>,
    /// Of its claim: for staging, and for growth on the node.
    pub(in crate::workload) secrets: HashMap<String, String>,
    pub(in crate::workload) source: Option<VolumeContentSource>,
    /// Known once it is made.
    pub(in crate::workload) id: String,
    pub(in crate::workload) context: HashMap<String, String>,
    pub(in crate::workload) staging: PathBuf,
    pods: PathBuf,
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Volume {
    /// With its folders, as the kubelet makes them.
    pub(in crate::workload) fn new(rig: &Rig, name: &str, shape: Shape, size: i64) -> Result<Self> {
        let kubelet = rig.plugin.kubelet_dir();
        let staging = kubelet.join("plugins/kubernetes.io/csi").join(name).join("globalmount");
        let pods = kubelet.join("pods").join(name);
        if shape != Shape::Inline {
            fs::create_dir_all(&staging)?;
        }
        fs::create_dir_all(&pods)?;
        let id = if shape == Shape::Inline { format!("csi-{name}") } else { String::new() };
        Ok(Self {
            name: name.to_owned(),
            shape,
            mode: Mode::SingleNodeMultiWriter,
            size,
            parameters: HashMap::new(),
            secrets: HashMap::new(),
            source: None,
            id,
            context: HashMap::new(),
            staging,
            pods,
        })
    }

    pub(in crate::workload) fn target(&self, number: u32) -> PathBuf {
        self.pods.join(format!("mount-{number}"))
    }

    fn capability(&self) -> Option<VolumeCapability> {
        Some(capability(self.shape, self.mode))
    }

    pub(in crate::workload) fn create(&mut self, driver: &Driver) -> Answer<()> {
        let answer = driver.create_volume(CreateVolumeRequest {
            name: self.name.clone(),
            capacity_range: range(self.size, 0),
            volume_capabilities: self.capability().into_iter().collect(),
            parameters: self.parameters.clone(),
            volume_content_source: self.source.clone(),
            ..Default::default()
        })?;
        let volume = answer.volume.unwrap_or_default();
        (self.id, self.context) = (volume.volume_id, volume.volume_context);
        Ok(())
    }

    pub(in crate::workload) fn stage(&self, driver: &Driver) -> Answer<()> {
        let request = NodeStageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: text(&self.staging),
            volume_capability: self.capability(),
            volume_context: self.context.clone(),
            secrets: self.secrets.clone(),
            ..Default::default()
        };
        driver.node_stage_volume(request).map(drop)
    }

    pub(in crate::workload) fn publish(&self, driver: &Driver, number: u32) -> Answer<()> {
        self.publish_as(driver, number, self.mode, false)
    }

    pub(in crate::workload) fn publish_as(
        &self,
        driver: &Driver,
        number: u32,
        mode: Mode,
        readonly: bool,
    ) -> Answer<()> {
        let mut request = NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: text(&self.staging),
            target_path: text(&self.target(number)),
            volume_capability: Some(capability(self.shape, mode)),
            volume_context: self.context.clone(),
            readonly,
            ..Default::default()
        };
        if self.shape == Shape::Inline {
            request.staging_target_path.clear();
            let context = [("csi.storage.k8s.io/ephemeral", "true"), ("size", "64Mi")];
            let context = context.map(|(key, value)| (key.to_owned(), value.to_owned()));
            request.volume_context.extend(context);
        }
        driver.node_publish_volume(request).map(drop)
    }

    pub(in crate::workload) fn unpublish(&self, driver: &Driver, number: u32) -> Answer<()> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: self.id.clone(),
            target_path: text(&self.target(number)),
        };
        driver.node_unpublish_volume(request).map(drop)
    }

    pub(in crate::workload) fn unstage(&self, driver: &Driver) -> Answer<()> {
        let request = NodeUnstageVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: text(&self.staging),
        };
        driver.node_unstage_volume(request).map(drop)
    }

    pub(in crate::workload) fn grow(&mut self, driver: &Driver, size: i64) -> Answer<()> {
        let request = ControllerExpandVolumeRequest {
            volume_id: self.id.clone(),
            capacity_range: range(size, 0),
            ..Default::default()
        };
        driver.controller_expand_volume(request)?;
        self.size = size;
        Ok(())
    }

    pub(in crate::workload) fn node_grow(&self, driver: &Driver, number: u32) -> Answer<i64> {
        let request = NodeExpandVolumeRequest {
            volume_id: self.id.clone(),
            volume_path: text(&self.target(number)),
            staging_target_path: text(&self.staging),
            capacity_range: range(self.size, 0),
            secrets: self.secrets.clone(),
            ..Default::default()
        };
        driver.node_expand_volume(request).map(|answer| answer.capacity_bytes)
    }

    pub(in crate::workload) fn stats(&self, driver: &Driver, number: u32) -> Answer<bool> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: self.id.clone(),
            volume_path: text(&self.target(number)),
            ..Default::default()
        };
        let answer = driver.node_get_volume_stats(request)?;
        Ok(answer.volume_condition.is_some_and(|condition| condition.abnormal))
    }

    pub(in crate::workload) fn delete(&self, driver: &Driver) -> Answer<()> {
        let request = DeleteVolumeRequest { volume_id: self.id.clone(), ..Default::default() };
        driver.delete_volume(request).map(drop)
    }

    /// Removes the folders that existed before. Fails when the plugin has left anything in them.
    pub(in crate::workload) fn gone(&self) -> Result<()> {
        for folder in [&self.staging, &self.pods] {
            match fs::remove_dir(folder) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => other.with_context(|| format!("{} is not empty", folder.display()))?,
            }
        }
        if let Some(above) = self.staging.parent().filter(|above| above.exists()) {
            fs::remove_dir(above).with_context(|| above.display().to_string())?;
        }
        Ok(())
    }
}

/// The objects beyond those that the daemon has by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::workload) struct Left {
    pub(in crate::workload) volumes: Vec<String>,
    pub(in crate::workload) devices: Vec<String>,
    pub(in crate::workload) mappings: Vec<String>,
    pub(in crate::workload) mounts: Vec<String>,
    pub(in crate::workload) records: Vec<String>,
    pub(in crate::workload) folders: Vec<String>,
}

/// Counts all that could have been left.
pub(in crate::workload) fn left(rig: &Rig) -> Result<Left> {
    let kubelet = text(&rig.plugin.kubelet_dir());
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mounts = mounts.lines().filter(|line| line.contains(&kubelet));
    let names = |folder: &Path, prefix: &str| -> Result<Vec<String>> {
        let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
        let names = entries.map(|entry| Ok(text(Path::new(&entry?.file_name()))));
        let names: Vec<String> = names.collect::<Result<_>>()?;
        Ok(names.into_iter().filter(|name| name.starts_with(prefix)).collect())
    };
    let mut folders = names(&Path::new(&kubelet).join("pods"), "")?;
    folders.extend(names(&Path::new(&kubelet).join("plugins/kubernetes.io/csi"), "")?);
    Ok(Left {
        volumes: rig.control()?.names()?,
        devices: names(Path::new("/sys/block"), "ublkb")?,
        mappings: names(Path::new("/sys/block"), "dm-")?,
        mounts: mounts.map(str::to_owned).collect(),
        records: names(&rig.plugin.state_dir(), "")?,
        folders,
    })
}

/// Fails when something is left.
pub(in crate::workload) fn nothing_left(rig: &Rig, after: &str) -> Result<()> {
    let left = left(rig)?;
    ensure!(left == Left::default(), "after {after}: {left:?}; {}", rig.plugin.last_words());
    Ok(())
}
