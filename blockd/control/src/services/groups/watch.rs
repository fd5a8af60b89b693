//! The groups from the daemon's start on: which there are, whether this host may still use them,
//! and the cells that could not be opened before that was known.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_media::error::{Error, shown};

use super::super::{Control, blocking};
use super::{FENCED, Group};
use crate::config::PoolConfig;
use crate::node::NodeId;

/// How long the devices of groups may take to answer before what does not need them goes on.
const START_WAIT: Duration = Duration::from_secs(10);

impl Control {
    /// Reads which groups there are, before a pool is opened. Looks whether this host was fenced
    /// from one while the daemon was down (H5), and registers with the devices after a boot, which
    /// the locks of the group need (H1). Groups whose devices do not answer in time are looked at
    /// later: their pools are opened then. Pools of cells that this host has not any more are
    /// forgotten.
    ///
    /// # Errors
    /// If the list can't be read: pools in its cells could be opened against the rules.
    pub async fn start_groups(&self) -> Result<(), Error> {
        let control = self.clone();
        blocking(move || control.0.groups.read()).await?;
        let mut looks = tokio::task::JoinSet::new();
        for group in self.0.groups.all() {
            let control = self.clone();
            looks.spawn(async move { control.enter_group(&group).await });
        }
        let all = async { while looks.join_next().await.is_some() {} };
        if tokio::time::timeout(START_WAIT, all).await.is_err() {
            tracing::warn!("disks of a volume group do not answer: its cells are opened later");
            looks.detach_all();
        }
        for config in self.remembered_pools()? {
            // What is in the place of a file system that is not mounted says nothing.
            let group = self.0.groups.cell_at(&config.devices[0].path).map(|(group, _)| group);
            if let Some(group) = group.filter(|group| group.is_entered()) {
                self.forget_unheld(&group, &config).await?;
            }
        }
        Ok(())
    }

    /// Forgets the pool of a cell that this host has not any more. False where it has it, or that
    /// can't be seen.
    async fn forget_unheld(&self, group: &Arc<Group>, config: &PoolConfig) -> Result<bool, Error> {
        let device = config.devices[0].path.clone();
        let Some(cell) = group.coordinator().cell_at(&device) else { return Ok(false) };
        // A call may be taking the cell just now.
        let _one = self.lock_cell(group, &cell).await;
        if self.known(&config.name).is_ok_and(|known| known.state.is_ok()) {
            return Ok(true);
        }
        let looked_at = Arc::clone(group);
        if blocking(move || Ok(looked_at.coordinator().holds(&device))).await? {
            return Ok(false);
        }
        let group = shown(&group.name);
        tracing::info!(pool = config.name, "cell {cell} of {group} is not held any more");
        // Clients on standby go on to wait for it.
        self.forget_but_attachments(&config.name).await?;
        Ok(true)
    }

    /// The part of the start that is about one group.
    async fn enter_group(&self, group: &Arc<Group>) {
        self.look_at_membership(group).await;
        let member = group.member();
        let is_outdated = member.address != self.0.options.hosts.published()
            || member.node != self.node().map(NodeId::number);
        if !group.is_lost()
            && (!member.is_registered() || is_outdated)
            && let Err(error) = self.join_group(group).await
        {
            tracing::info!(group = group.name, %error, "the group is not used yet");
        }
        self.reopen_cells(group).await;
    }

    /// Opens pools that could not be opened before the group was looked at.
    pub(super) async fn reopen_cells(&self, group: &Arc<Group>) {
        for known in self.known_pools() {
            let is_in =
                known.paths().iter().any(|path| group.coordinator().cell_at(path).is_some());
            if is_in && known.state.is_err() && !known.is_closed() && group.refusal().is_none() {
                let name = &known.config.name;
                let opened = match self.forget_unheld(group, &known.config).await {
                    Ok(false) => self.reopen_pool(name).await.map(drop),
                    forgotten => forgotten.map(drop),
                };
                if let Err(error) = opened {
                    tracing::warn!(pool = name, %error, "the pool is still not open");
                }
            }
        }
    }

    /// Looks whether this host was fenced from a group. A device that can't be asked is no fence.
    async fn look_at_membership(&self, group: &Arc<Group>) {
        if group.is_looked_at.swap(true, Ordering::AcqRel) {
            return;
        }
        let (control, looked_at) = (self.clone(), Arc::clone(group));
        let looked = blocking(move || {
            let was_fenced = !looked_at.is_lost() && looked_at.was_fenced(None)?;
            if was_fenced && let Err(error) = control.0.groups.lose(&looked_at) {
                tracing::warn!(group = looked_at.name, %error, "a fence is not remembered");
            }
            Ok(was_fenced)
        });
        let mut is_first = false;
        match looked.await {
            Ok(was_fenced) => {
                is_first = group.is_entered() && !group.is_checked.swap(true, Ordering::AcqRel);
                if was_fenced {
                    self.drop_cells(group, FENCED).await;
                }
            }
            Err(error) => {
                tracing::warn!(group = group.name, %error, "can't see whether this host is fenced");
            }
        }
        self.join_later(group).await;
        group.is_looked_at.store(false, Ordering::Release);
        if is_first {
            self.reopen_cells(group).await;
        }
    }

    /// Joins a group that could not be joined whole before. A folder's file system was not mounted;
    /// or the group's locks were not started when this host registered: until it is known to the
    /// others they count it as dead still, and can't ask it for cells.
    async fn join_later(&self, group: &Arc<Group>) {
        let member = group.member();
        let is_known = !member.is_registered() || member.is_published;
        if group.is_lost() || (group.is_entered() && is_known) {
            return;
        }
        if let Err(error) = self.register_with(group).await {
            tracing::debug!(group = group.name, %error, "the group is still not joined");
        }
    }

    /// Looks at all memberships, side by side. To be called every few seconds: a host that has no
    /// IO does not meet its fence otherwise.
    pub async fn watch_groups(&self) {
        let mut looks = tokio::task::JoinSet::new();
        for group in self.0.groups.all() {
            let control = self.clone();
            looks.spawn(async move { control.look_at_membership(&group).await });
        }
        let all = async { while looks.join_next().await.is_some() {} };
        // One that does not answer is looked at by its own task, and not twice.
        let _ = tokio::time::timeout(START_WAIT, all).await;
        looks.detach_all();
    }
}
