-- The oldest are told first, whichever tenant's they are; finding them by the primary key took a look at all.
create index announcements_oldest on waybill.announcements (announcement_id);
