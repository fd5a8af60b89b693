//! The context of a case: requests that are valid as they come, and a list of the objects made, so
//! that all of them can be removed again.

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use blockd_csi::proto::volume_content_source as source;
use blockd_csi::proto::{
    CapacityRange, CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest, CreateVolumeRequest,
    DeleteSnapshotRequest, DeleteVolumeGroupSnapshotRequest, DeleteVolumeRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, Snapshot, Volume, VolumeCapability, VolumeContentSource,
    VolumeGroupSnapshot,
};
use tonic::{Code, Status};

use super::Options;
use super::case::NotOffered;
use super::driver::{Driver, Offers};

/// The result of a call.
pub type Answer<T> = std::result::Result<T, Status>;

/// Attempts at a removal that is answered with ABORTED or UNAVAILABLE, and the time between them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// A case's way to its driver.
#[derive(Debug)]
pub(super) struct Cx<'a> {
    pub(super) driver: &'a Driver,
    pub(super) options: &'a Options,
    case: &'static str,
    run: u32,
    made: u32,
    volumes: Vec<String>,
    snapshots: Vec<String>,
    /// Each with its snapshots.
    groups: Vec<(String, Vec<String>)>,
    staged: Vec<(String, String)>,
    published: Vec<(String, String)>,
    folders: Vec<PathBuf>,
}

impl<'a> Cx<'a> {
    pub(super) fn new(driver: &'a Driver, options: &'a Options, case: &'static str) -> Self {
        Self {
            driver,
            options,
            case,
            run: fastrand::u32(..),
            made: 0,
            volumes: Vec::new(),
            snapshots: Vec::new(),
            groups: Vec::new(),
            staged: Vec::new(),
            published: Vec::new(),
            folders: Vec::new(),
        }
    }

    pub(super) fn offers(&self) -> &Offers {
        self.driver.offers()
    }

    /// A name that nothing has.
    pub(super) fn name(&mut self) -> String {
        self.made += 1;
        format!("suite-{:08x}-{}", self.run, self.made)
    }

    /// A name of 128 characters that nothing has, filled up with this one.
    pub(super) fn long_name(&mut self, fill: char) -> String {
        let mut name = self.name();
        name.extend(std::iter::repeat_n(fill, 128 - name.len()));
        name
    }

    /// Mounted, by the file system of the options.
    pub(super) fn mount(&self, mode: Mode) -> VolumeCapability {
        mounted_as(&self.options.fs_type, mode)
    }

    /// A volume of the usual size, mounted by one writer.
    pub(super) fn request(&mut self) -> CreateVolumeRequest {
        CreateVolumeRequest {
            name: self.name(),
            capacity_range: range(self.options.size, 0),
            volume_capabilities: vec![self.mount(Mode::SingleNodeWriter)],
            parameters: self.options.parameters.clone(),
            ..Default::default()
        }
    }

    /// The same as a block device.
    pub(super) fn block_request(&mut self) -> CreateVolumeRequest {
        CreateVolumeRequest {
            volume_capabilities: vec![block(Mode::SingleNodeWriter)],
            ..self.request()
        }
    }

    /// Of this size.
    pub(super) fn request_of(&mut self, required: i64, limit: i64) -> CreateVolumeRequest {
        CreateVolumeRequest { capacity_range: range(required, limit), ..self.request() }
    }

    /// With one more parameter.
    pub(super) fn request_with(&mut self, key: &str, value: &str) -> CreateVolumeRequest {
        let mut request = self.request();
        request.parameters.insert(key.to_owned(), value.to_owned());
        request
    }

    /// Made from this.
    pub(super) fn request_from(&mut self, source: source::Type) -> CreateVolumeRequest {
        let volume_content_source = Some(VolumeContentSource { r#type: Some(source) });
        CreateVolumeRequest { volume_content_source, ..self.request() }
    }

    pub(super) fn create(&mut self, request: &CreateVolumeRequest) -> Answer<Volume> {
        let answer = self.driver.create_volume(request.clone())?;
        let volume =
            answer.volume.ok_or_else(|| Status::data_loss("an answer without a volume"))?;
        self.remember_volume(&volume.volume_id);
        Ok(volume)
    }

    /// To be removed after the case.
    pub(super) fn remember_volume(&mut self, id: &str) {
        if !self.volumes.iter().any(|known| known == id) {
            self.volumes.push(id.to_owned());
        }
    }

    /// A new volume of the usual kind.
    pub(super) fn volume(&mut self) -> Result<Volume> {
        let request = self.request();
        self.create(&request).context("making a volume")
    }

    pub(super) fn delete(&self, id: &str) -> Answer<()> {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        self.driver.delete_volume(request).map(|_| ())
    }

    /// The id of a volume that was deleted: well formed, but unknown to the driver.
    pub(super) fn gone_volume(&mut self) -> Result<String> {
        let volume = self.volume()?;
        self.delete(&volume.volume_id).context("deleting a volume")?;
        Ok(volume.volume_id)
    }

    pub(super) fn snapshot_request(&mut self, volume: &str) -> CreateSnapshotRequest {
        CreateSnapshotRequest {
            source_volume_id: volume.to_owned(),
            name: self.name(),
            ..Default::default()
        }
    }

    pub(super) fn snapshot(&mut self, request: &CreateSnapshotRequest) -> Answer<Snapshot> {
        let answer = self.driver.create_snapshot(request.clone())?;
        let snapshot =
            answer.snapshot.ok_or_else(|| Status::data_loss("an answer without a snapshot"))?;
        if !self.snapshots.contains(&snapshot.snapshot_id) {
            self.snapshots.push(snapshot.snapshot_id.clone());
        }
        Ok(snapshot)
    }

    /// A new volume, and a snapshot of it.
    pub(super) fn volume_and_snapshot(&mut self) -> Result<(Volume, Snapshot)> {
        let volume = self.volume()?;
        let request = self.snapshot_request(&volume.volume_id);
        let snapshot = self.snapshot(&request).context("taking a snapshot")?;
        Ok((volume, snapshot))
    }

    pub(super) fn delete_snapshot(&self, id: &str) -> Answer<()> {
        let request = DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        self.driver.delete_snapshot(request).map(|_| ())
    }

    /// The id of a snapshot that was there and is gone.
    pub(super) fn gone_snapshot(&mut self) -> Result<String> {
        let (_, snapshot) = self.volume_and_snapshot()?;
        self.delete_snapshot(&snapshot.snapshot_id).context("deleting a snapshot")?;
        Ok(snapshot.snapshot_id)
    }

    // ------------------------------------------------------------------------------------ groups

    /// A group of these volumes.
    pub(super) fn group_request(&mut self, volumes: &[&str]) -> CreateVolumeGroupSnapshotRequest {
        CreateVolumeGroupSnapshotRequest {
            name: self.name(),
            source_volume_ids: volumes.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        }
    }

    pub(super) fn group(
        &mut self,
        request: &CreateVolumeGroupSnapshotRequest,
    ) -> Answer<VolumeGroupSnapshot> {
        let answer = self.driver.create_volume_group_snapshot(request.clone())?;
        let group =
            answer.group_snapshot.ok_or_else(|| Status::data_loss("an answer without a group"))?;
        let snapshots = group.snapshots.iter().map(|one| one.snapshot_id.clone()).collect();
        let pair = (group.group_snapshot_id.clone(), snapshots);
        if !self.groups.contains(&pair) {
            self.groups.push(pair);
        }
        Ok(group)
    }

    /// Two new volumes, and a group of them.
    pub(super) fn volumes_and_group(&mut self) -> Result<([String; 2], VolumeGroupSnapshot)> {
        let volumes = [self.volume()?.volume_id, self.volume()?.volume_id];
        let request = self.group_request(&[&volumes[0], &volumes[1]]);
        let group = self.group(&request).context("taking snapshots of two volumes")?;
        Ok((volumes, group))
    }

    pub(super) fn delete_group(&self, id: &str, snapshots: &[String]) -> Answer<()> {
        let request = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.to_owned(),
            snapshot_ids: snapshots.to_vec(),
            ..Default::default()
        };
        self.driver.delete_volume_group_snapshot(request).map(|_| ())
    }

    // ------------------------------------------------------------------------------------- node

    /// A path to stage at, which is there, as the kubelet makes it.
    pub(super) fn staging(&mut self) -> Result<String> {
        let folder = self.options.staging_dir.join(self.name());
        let path = folder.join("globalmount");
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        self.folders.push(folder);
        text(&path)
    }

    /// A path to publish at, whose parent is there.
    pub(super) fn target(&mut self) -> Result<String> {
        let folder = self.options.target_dir.join(self.name());
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join("mount");
        self.folders.push(folder);
        text(&path)
    }

    /// To be removed after the case, with what is in it.
    pub(super) fn remember_folder(&mut self, folder: &Path) {
        self.folders.push(folder.to_path_buf());
    }

    pub(super) fn stage(&mut self, request: &NodeStageVolumeRequest) -> Answer<()> {
        // Also where it fails: it may have gone halfway.
        let pair = (request.volume_id.clone(), request.staging_target_path.clone());
        if !self.staged.contains(&pair) {
            self.staged.push(pair);
        }
        self.driver.node_stage_volume(request.clone()).map(|_| ())
    }

    pub(super) fn publish(&mut self, request: &NodePublishVolumeRequest) -> Answer<()> {
        let pair = (request.volume_id.clone(), request.target_path.clone());
        if !self.published.contains(&pair) {
            self.published.push(pair);
        }
        self.driver.node_publish_volume(request.clone()).map(|_| ())
    }

    pub(super) fn unstage(&self, id: &str, path: &str) -> Answer<()> {
        let request = NodeUnstageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: path.to_owned(),
        };
        self.driver.node_unstage_volume(request).map(|_| ())
    }

    pub(super) fn unpublish(&self, id: &str, path: &str) -> Answer<()> {
        let request =
            NodeUnpublishVolumeRequest { volume_id: id.to_owned(), target_path: path.to_owned() };
        self.driver.node_unpublish_volume(request).map(|_| ())
    }

    /// A new volume, staged for this use.
    pub(super) fn staged(&mut self, capability: VolumeCapability) -> Result<Staged> {
        let mut request = self.request();
        request.volume_capabilities = vec![capability.clone()];
        let volume = self.create(&request).context("making a volume")?;
        self.stage_volume(&volume, capability)
    }

    /// Stages a volume at a new path.
    pub(super) fn stage_volume(
        &mut self,
        volume: &Volume,
        capability: VolumeCapability,
    ) -> Result<Staged> {
        let stage = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: self.staging()?,
            volume_capability: Some(capability),
            volume_context: volume.volume_context.clone(),
            ..Default::default()
        };
        self.stage(&stage).context("staging a volume")?;
        Ok(Staged { id: volume.volume_id.clone(), size: volume.capacity_bytes, stage })
    }

    /// Publishes what is staged at a new path, which is returned.
    pub(super) fn published(&mut self, staged: &Staged) -> Result<String> {
        let target = self.target()?;
        self.publish(&staged.publish(&target)).context("publishing a volume")?;
        Ok(target)
    }

    /// Removes all that was made, the last first.
    pub(super) fn clean(&mut self) -> Result<()> {
        let mut failed = Vec::new();
        let mut note = |what: String, answer: Answer<()>| match answer {
            Err(status) if status.code() != Code::NotFound => {
                failed.push(format!("{what}: {status}"))
            }
            _ => {}
        };
        for (id, path) in self.published.iter().rev() {
            note(format!("unpublishing {id}"), patiently(|| self.unpublish(id, path)));
        }
        for (id, path) in self.staged.iter().rev() {
            note(format!("unstaging {id}"), patiently(|| self.unstage(id, path)));
        }
        for (id, snapshots) in self.groups.iter().rev() {
            note(format!("deleting {id}"), patiently(|| self.delete_group(id, snapshots)));
        }
        for id in self.snapshots.iter().rev() {
            note(format!("deleting {id}"), patiently(|| self.delete_snapshot(id)));
        }
        for id in self.volumes.iter().rev() {
            note(format!("deleting {id}"), patiently(|| self.delete(id)));
        }
        for folder in self.folders.iter().rev() {
            remove(folder, &self.options.staging_dir)?;
        }
        ensure!(failed.is_empty(), "after {}: {}", self.case, failed.join("; "));
        Ok(())
    }
}

/// A volume that is staged.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) id: String,
    pub(super) size: i64,
    pub(super) stage: NodeStageVolumeRequest,
}

impl Staged {
    pub(super) fn path(&self) -> &str {
        &self.stage.staging_target_path
    }

    /// The request that publishes it here, for what it was staged for.
    pub(super) fn publish(&self, target: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            staging_target_path: self.stage.staging_target_path.clone(),
            target_path: target.to_owned(),
            volume_capability: self.stage.volume_capability.clone(),
            volume_context: self.stage.volume_context.clone(),
            ..Default::default()
        }
    }

    /// The same with another mode.
    pub(super) fn publish_as(&self, target: &str, mode: Mode) -> NodePublishVolumeRequest {
        let mut request = self.publish(target);
        if let Some(capability) = &mut request.volume_capability {
            capability.access_mode = Some(AccessMode { mode: mode.into() });
        }
        request
    }
}

/// Retries a removal while other operations block it.
fn patiently(mut ask: impl FnMut() -> Answer<()>) -> Answer<()> {
    let mut answer = ask();
    for _ in 0..ATTEMPTS {
        let code = answer.as_ref().err().map(Status::code);
        if !matches!(code, Some(Code::Aborted | Code::Unavailable | Code::FailedPrecondition)) {
            break;
        }
        std::thread::sleep(PAUSE);
        answer = ask();
    }
    answer
}

/// A folder of ours goes as far as nothing of the driver is left in it: then it stays, and counts
/// as leaked. A staging path is the CO's to remove.
fn remove(folder: &Path, staging_dir: &Path) -> Result<()> {
    if folder.starts_with(staging_dir) {
        let _ = fs::remove_dir(folder.join("globalmount"));
    }
    match fs::remove_dir(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => Ok(()),
        Err(error) => Err(error).with_context(|| format!("removing {}", folder.display())),
    }
}

/// A path as requests have it.
pub(super) fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is no text", path.display()))
}

/// Each path below a folder, and each mount there.
pub(super) fn below(folder: &Path) -> Result<Vec<String>> {
    let mut all: Vec<String> = mounts()?
        .into_iter()
        .filter(|mount| mount.path.starts_with(folder))
        .map(|mount| format!("mount {}", mount.path.display()))
        .collect();
    let mut waiting = vec![folder.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        // Others come and go beside the suite.
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            all.push(format!("path {}", entry.path().display()));
            // A mounted folder may have data of others.
            let mounted = all.contains(&format!("mount {}", entry.path().display()));
            if is_dir && !mounted {
                waiting.push(entry.path());
            }
        }
    }
    Ok(all)
}

/// A line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) path: PathBuf,
    /// Of the mount and of the file system, separated by commas.
    pub(super) options: String,
    pub(super) fs_type: String,
}

/// The mount table of this process.
pub(super) fn mounts() -> Result<Vec<Mount>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("reading the mount table")?;
    Ok(table.lines().filter_map(mount_of).collect())
}

fn mount_of(line: &str) -> Option<Mount> {
    let (first, second) = line.split_once(" - ")?;
    let first: Vec<&str> = first.split(' ').collect();
    let second: Vec<&str> = second.split(' ').collect();
    // Spaces and the like are written as octal numbers.
    let path = first.get(4)?.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\");
    let options = format!("{},{}", first.get(5)?, second.get(2)?);
    Some(Mount { path: path.into(), options, fs_type: (*second.first()?).to_owned() })
}

/// The topmost mount at this path, if something is mounted there.
pub(super) fn mounted_at(path: &str) -> Result<Option<Mount>> {
    Ok(mounts()?.into_iter().rfind(|mount| mount.path == Path::new(path)))
}

/// Two sizes as a request has them.
#[must_use]
pub fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange { required_bytes, limit_bytes })
}

/// Used as a block device.
#[must_use]
pub fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Block(BlockVolume {})),
    }
}

/// Mounted by this file system.
#[must_use]
pub(super) fn mounted_as(fs_type: &str, mode: Mode) -> VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..Default::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

/// Checks that the call was refused with this code and a message, and returns the status.
///
/// # Errors
/// When it was not.
pub fn refused<T: Debug>(answer: Answer<T>, code: Code) -> Result<Status> {
    refused_as(answer, &[code])
}

/// Checks that the call was refused with one of these codes and a message; returns the status.
pub(super) fn refused_as<T: Debug>(answer: Answer<T>, codes: &[Code]) -> Result<Status> {
    match answer {
        Ok(answer) => bail!("expected {codes:?}, got {answer:?}"),
        Err(status) if !codes.contains(&status.code()) => {
            bail!("expected {codes:?}, got {:?}: {}", status.code(), status.message())
        }
        Err(status) => {
            ensure!(!status.message().is_empty(), "{:?} without a message", status.code());
            Ok(status)
        }
    }
}

/// Checks that the message contains each of these.
pub(super) fn says(status: &Status, words: &[&str]) -> Result<()> {
    let message = status.message();
    let missing: Vec<_> = words.iter().filter(|word| !message.contains(**word)).collect();
    ensure!(missing.is_empty(), "{message:?} does not say {missing:?}");
    Ok(())
}

/// Ends a case that is about nothing the driver has.
pub(super) fn not_offered<T>(what: &str) -> Result<T> {
    Err(NotOffered(what.to_owned()).into())
}

/// A map of one entry.
pub(super) fn one(key: &str, value: &str) -> HashMap<String, String> {
    HashMap::from([(key.to_owned(), value.to_owned())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_is_read() {
        let line = "36 35 98:0 / /mnt/a\\040b rw,noatime shared:1 - ext4 /dev/x rw,errors=continue";
        let mount = mount_of(line).unwrap();
        assert_eq!(mount.path, Path::new("/mnt/a b"));
        assert_eq!(mount.options, "rw,noatime,rw,errors=continue");
        assert_eq!(mount.fs_type, "ext4");
        assert_eq!(mount_of("no mount"), None);
    }

    #[test]
    fn an_answer_in_place_of_a_refusal_is_reported() {
        assert!(refused(Ok(1), Code::NotFound).unwrap_err().to_string().contains("got 1"));
        let other = refused::<()>(Err(Status::internal("x")), Code::NotFound).unwrap_err();
        assert!(other.to_string().contains("Internal"), "{other}");
        assert!(refused::<()>(Err(Status::not_found("")), Code::NotFound).is_err());
        let status = refused::<()>(Err(Status::not_found("gone: a")), Code::NotFound).unwrap();
        assert!(says(&status, &["gone", "a"]).is_ok() && says(&status, &["b"]).is_err());
    }
}
